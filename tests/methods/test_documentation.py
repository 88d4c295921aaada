"""The worked example of docs/adding-a-method.md runs as it stands; other packages' methods are found."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


def python(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )


def test_the_worked_example_runs_and_is_short(tmp_path):
    example, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) < 40
    (tmp_path / "feddyn.py").write_text(example, encoding="utf-8")
    done = python("feddyn.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout) <= 1
    assert (tmp_path / "runs/feddyn/summary.json").exists()
    states = list((tmp_path / "runs/feddyn/states").glob("client_*"))
    assert states, "h_i must have been kept"


def test_the_example_of_a_server_state_runs(tmp_path):
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [text for text in examples if "class ServerMomentum" in text]
    (tmp_path / "momentum.py").write_text(example, encoding="utf-8")
    done = python("momentum.py", cwd=tmp_path)
    assert 0 <= float(done.stdout) <= 1, done.stderr
    wrong = example.replace("self.zero_update(weights, layout)", "0 * weights")
    (tmp_path / "wrong.py").write_text(wrong.replace("runs/momentum", "runs/wrong"), encoding="utf-8")
    said = python("wrong.py", cwd=tmp_path).stderr.splitlines()[-1]
    assert said.startswith("fedld.errors.FedLDError: the server side of method ServerMomentum failed: ")
    assert "is self.zero_update(weights, layout)" in said


def test_an_installed_package_adds_a_method(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from fedld.methods import FedProx\nSTRONG = FedProx(mu=1.0)\n", encoding="utf-8"
    )
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[fedld.methods]\nstrong = plugin:STRONG\n", encoding="utf-8")
    code = "from fedld.methods import METHODS; print(METHODS['strong'].mu, len(METHODS))"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=path(tmp_path))
    assert done.stdout.startswith("1.0 "), done.stderr


def test_a_broken_plugin_is_named_and_breaks_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("raise ImportError('no such thing')\n", encoding="utf-8")
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    groups = ("methods", "objectives", "rules", "models", "datasets", "partitions", "metrics")
    text = "".join(f"[fedld.{group}]\nbad = broken:VALUE\n" for group in groups)
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    code = "from fedld.cli import app; app(['methods'])"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=path(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout
    assert "plugin 'bad' (broken:VALUE): no such thing" in done.stderr


def path(folder):
    """Where Python looks: the folder first."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
