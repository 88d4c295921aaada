import signal
import subprocess
import sys
import time
from pathlib import Path

FEDLD = str(Path(sys.executable).with_name("fedld"))


def test_a_killed_study_leaves_no_process_behind_and_goes_on_at_once(tmp_path):
    out = tmp_path / "study"
    command = [FEDLD, "compare", "--dataset", "digits", "--methods", "fedavg,fedprox", "--seeds", "0"]
    command += ["--clients", "3", "--rounds", "40", "--out", str(out)]
    study = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(out.glob("runs/*/rounds.jsonl")):
        assert study.poll() is None
        time.sleep(0.05)
    study.send_signal(signal.SIGKILL)
    study.wait()
    assert not list(out.glob("runs/*/summary.json"))  # killed in the middle, or this test shows nothing
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list(out.glob("runs/*/summary.json"))) == 2
