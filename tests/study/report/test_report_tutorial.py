"""The tutorial's blocks, run in order in one interpreter, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorial.md"


def test_every_block_of_the_tutorial_runs(tmp_path):
    pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")
    blocks = re.findall(
        r"^```python\n(.*?)^```", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(blocks) >= 6
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FEDLD_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").read_text().count("<figure") > 10
