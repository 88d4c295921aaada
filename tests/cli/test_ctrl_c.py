"""Ctrl-C at any moment: a sentence, exit code 130, no traceback; and lines of progress without a terminal."""

import os
import signal
import subprocess
import sys
import time

STUDY = ["--dataset", "digits", "--methods", "fedavg", "--seeds", "0", "--rounds", "500", "--jobs", "1"]


def _interrupted(words, when, tmp_path):
    command = [sys.executable, "-m", "fedld", *words]
    environment = {**os.environ, "FEDLD_CACHE": str(tmp_path / "cache")}
    log = tmp_path / "stderr.txt"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, start_new_session=True, env=environment)
    while not when(process.pid):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=120)
    text = log.read_text()
    assert "Traceback" not in text
    assert process.returncode == 130, text
    return text


def test_a_study_says_how_to_go_on_and_shows_its_rounds_in_a_log(tmp_path):
    out = tmp_path / "study"
    log = tmp_path / "stderr.txt"
    command = ["compare", *STUDY, "--out", str(out)]
    text = _interrupted(command, lambda _: "fedavg-seed0  round 1  accuracy" in log.read_text(), tmp_path)
    assert f"continue with: fedld compare --resume {out}" in " ".join(text.split())


def _has_child(pid):
    """The workers' server is started before the long imports; a moment later they are under way."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        found = file.read().strip()
    time.sleep(0.3 if found else 0)
    return found


def test_the_first_seconds_show_no_tracebacks_of_imports(tmp_path):
    text = _interrupted(["run", "--dataset", "digits", "--out", str(tmp_path / "run")], _has_child, tmp_path)
    assert "stopped" in text


def test_an_interrupt_inside_executed_text_has_the_same_exit_code(tmp_path):
    """Dataclasses are made by `exec` while modules are imported: Python would end by the signal instead."""
    (tmp_path / "click.py").write_text('exec("raise KeyboardInterrupt")')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", "fedld", "methods"], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (130, "fedld: stopped\n")


def test_an_interrupt_before_a_command_has_begun_its_run_is_a_sentence(tmp_path):
    """Typer turns Ctrl-C in a command into an exit code without a word."""
    (tmp_path / "interrupting.py").write_text("raise KeyboardInterrupt")
    words = ["run", "--dataset", "digits", "--model", "interrupting:net", "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-m", "fedld", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (130, "fedld: stopped\n")
