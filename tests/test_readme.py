"""README's commands and snippets run exactly as printed, from an empty folder, as scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]
ELSEWHERE = ("make ", "pip ")
"""What needs a clone or the network: the Makefile's own jobs, and installation."""


def run(words, folder):
    """A process with this environment's commands in its path; gives what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_commands_run_as_printed(tmp_path):
    commands = [line for line in COMMANDS if not line.startswith(ELSEWHERE)]
    assert len(commands) > 1
    for command in commands:
        assert command.startswith("fedld ")
        run(["sh", "-c", command], tmp_path)
    assert (tmp_path / "clients.png").exists()
    assert (tmp_path / "runs/mine/report.html").exists()


def test_readme_fits_two_screens():
    lines = README.read_text().split("## Citing")[0].splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("snippet", [text for kind, text in BLOCKS if kind == "python"])
def test_snippets_run_as_scripts(snippet, tmp_path):
    (tmp_path / "script.py").write_text(snippet)
    assert run([sys.executable, "script.py"], tmp_path)
