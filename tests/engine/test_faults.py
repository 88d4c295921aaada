"""Nothing is lost: kills, torn checkpoints, full disks, bad clients, two writers."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fedld.analysis import decompose, decompose_line
from fedld.analysis.decomposition import TERMS
from fedld.analysis.diagnosis.page import diagnose_run
from fedld.engine import loop
from fedld.engine.backends.machine import ThisMachine
from fedld.engine.loop import resume, run
from fedld.errors import FedLDError
from fedld.local import LocalClient, Reply
from fedld.methods import METHODS, FedAvg, Method
from fedld.records.schema import CLIENTS, CROSS_LOSS, ROUNDS
from fedld.records.writer import RunDirectory, read_lines
from fedld.study.card import make_card

KILLS = 20


@dataclass(frozen=True)
class Counting(Method):
    """FedAvg whose clients count their rounds in their state: a lost or doubled state changes the model."""

    def client_update(self, client: LocalClient) -> Reply:
        count = client.state.get("count", torch.zeros(1)) + 1
        client.train(self.loss)
        client.weights.mul_(1 - 0.001 * count)
        return client.reply(state={"count": count})


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    monkeypatch.setitem(METHODS, "counting", Counting())


def _killed_after(seconds: float, work) -> bool:
    """Run `work` in a child process and kill it; False if it ended by itself."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_run_killed_at_random_moments_ends_as_if_nothing_had_happened(small, tmp_path, contents):
    experiment = small(method="counting", rounds=20, sample_rate=0.5, decompose=3)
    start = time.monotonic()
    run(experiment, tmp_path / "whole")
    pace = time.monotonic() - start
    draws, kills, path = random.Random(7), 0, tmp_path / "killed"
    while kills < KILLS:
        begun = (path / "config.toml").exists()
        work = partial(resume, path) if begun else partial(run, experiment, path)
        if _killed_after(draws.uniform(0.02, 0.4) * pace, work):
            kills += 1
        else:  # finished: check, and start over until the run has been killed often enough
            assert contents(path) == contents(tmp_path / "whole")
            path = tmp_path / f"killed-{kills}"
    if (path / "config.toml").exists():
        resume(path)
        assert contents(path) == contents(tmp_path / "whole")


def test_workers_killed_at_random_moments_change_nothing(small, tmp_path, contents, monkeypatch):
    settings = {"rounds": 40}
    run(small(**settings), tmp_path / "whole")
    pools = []
    start = ThisMachine.backend
    monkeypatch.setattr(ThisMachine, "backend", lambda *a: pools.append(start(*a)) or pools[-1])
    kills, stop, draws = [], threading.Event(), random.Random(3)

    def killer():
        while not stop.wait(draws.uniform(0.3, 1.5)):
            victim = draws.choice(pools[0]._members).process if pools else None
            if victim is not None and victim.is_alive() and len(kills) < 5:
                kills.append(victim.pid)
                os.kill(victim.pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        run(small(**settings, workers=2), tmp_path / "killed")
    finally:
        stop.set()
        thread.join()
    assert kills
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_ctrl_c_on_the_command_line_says_how_to_resume(tmp_path):
    out = tmp_path / "run"
    options = ["--dataset", "digits", "--rounds", "500", "--workers", "1", "--out", str(out)]
    command = [str(Path(sys.executable).with_name("fedld")), "run", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (out / "rounds.jsonl").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"continue with: fedld run --resume {out}" in text
    lines = (out / "rounds.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


@pytest.fixture
def interrupted(small, tmp_path, monkeypatch):
    """A run of four rounds that stopped after the third, and the same run undisturbed."""
    experiment = small(method="counting")
    run(experiment, tmp_path / "whole")
    original = loop.RoundLoop._advance

    def stop(self):
        if self.state.round == 3:
            raise KeyboardInterrupt
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.RoundLoop, "_advance", stop)
        with pytest.raises(loop.Interrupted, match="stopped after round 3"):
            run(experiment, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["round_00003.safetensors", "round_00003.json"])
@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(interrupted, contents, name, damage):
    path = interrupted / "checkpoints" / name
    content = bytearray(path.read_bytes())
    if damage == "torn":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    warnings = []
    resume(interrupted, warn=warnings.append)
    assert len(warnings) == 1
    assert "round 3 cannot be used" in warnings[0]
    assert contents(interrupted) == contents(interrupted.with_name("whole"))


def test_a_finished_run_is_left_as_it_is(small, tmp_path, contents):
    summary = run(small(rounds=1), tmp_path / "run")
    before = contents(tmp_path / "run")
    assert resume(tmp_path / "run")["test"]["final"]["accuracy"] == summary["test"]["final"]["accuracy"]
    assert contents(tmp_path / "run") == before


def test_two_runs_may_not_write_the_same_directory(small, tmp_path):
    held = RunDirectory(tmp_path / "run")
    try:
        with pytest.raises(FedLDError, match="another process is writing"):
            run(small(), tmp_path / "run")
    finally:
        held.close()


def test_a_full_disk_is_one_sentence_and_leaves_the_last_checkpoint_usable(small, tmp_path, contents):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        experiment = small(method="counting", rounds=8)
        run(experiment, tmp_path / "whole")
        with pytest.raises(FedLDError, match=r"No space left on device; round \d+ is safe"):
            run(experiment, disk / "run")
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        resume(disk / "run")
        assert contents(disk / "run") == contents(tmp_path / "whole")
    finally:
        subprocess.run(["umount", "-l", disk], check=False)


@dataclass(frozen=True)
class Troubled(FedAvg):
    """A method whose second client raises, diverges, or fails once."""

    trouble: str = "raises"

    def client_update(self, client: LocalClient) -> Reply:
        client.train(self.loss)
        if client.name == TROUBLED:
            if self.trouble == "raises":
                raise ValueError("the scanner is on fire")
            if self.trouble == "diverges":
                client.weights[3] = float("nan")
            if self.trouble == "later" and client.round in (2, 3):
                raise ValueError("the line is down")
            if self.trouble == "once" and not FAILED:
                FAILED.append(client.round)
                raise ValueError("a passing fault")
        return client.reply()


TROUBLED, FAILED = "client_2", []


@pytest.fixture
def troubled(monkeypatch):
    FAILED.clear()
    monkeypatch.setitem(METHODS, "troubled", Troubled())
    return lambda trouble: {"name": "troubled", "trouble": trouble}


@pytest.mark.parametrize("policy", ["retry", "stop"])
def test_a_client_that_raises_stops_the_run_and_is_named(small, tmp_path, troubled, policy):
    with pytest.raises(FedLDError, match=f"client '{TROUBLED}' failed in round 1: ValueError: the scanner"):
        run(small(method=troubled("raises"), on_client_failure=policy), tmp_path / "run")


@pytest.mark.parametrize("trouble", ["raises", "diverges"])
def test_a_bad_client_is_left_out_and_recorded(small, tmp_path, troubled, trouble):
    run(small(method=troubled(trouble), on_client_failure="skip", rounds=2), tmp_path / "run")
    lines = read_lines(tmp_path / "run", CLIENTS)
    excluded = {line["client"]: line["excluded"] for line in lines if "excluded" in line}
    assert list(excluded) == [TROUBLED]
    assert ("fire" if trouble == "raises" else "not finite") in excluded[TROUBLED]
    rounds = read_lines(tmp_path / "run", ROUNDS)
    assert [line["clients"] for line in rounds] == [3, 3]
    assert all(line["test"]["loss"] is not None for line in rounds)


def _identity_over_the_measured(path, missing):
    """The terms of the round before a client failed are over the others, and every record says so."""
    line, cross = read_lines(path, ROUNDS)[0], read_lines(path, CROSS_LOSS)[0]
    assert line["not_measured"] == cross["not_measured"] == missing
    kept = [i for i, name in enumerate(cross["clients"]) if name not in missing]
    matrix = np.array(cross["cross_loss"])[np.ix_(kept, kept)]
    expected = decompose(matrix, np.array(cross["global_losses"])[kept], np.array(cross["sizes"])[kept])
    terms = [line[f"{term}_loss"] for term in ("local", "shift", "aggregation", "global")]
    assert terms == pytest.approx([getattr(expected, term) for term in TERMS], rel=1e-12)
    assert line["identity_error"] < 1e-12


def test_a_client_missing_after_a_decomposed_round_is_named_and_the_identity_is_over_the_others(
    small, tmp_path, troubled
):
    settings = {"method": troubled("later"), "on_client_failure": "skip", "decompose": 2, "rounds": 4}
    run(small(**settings), tmp_path / "run")
    _identity_over_the_measured(tmp_path / "run", [TROUBLED])
    assert ["not_measured" in line for line in read_lines(tmp_path / "run", CROSS_LOSS)] == [
        True,
        True,
        False,
    ]
    findings = {one.check: one.sentence for one in diagnose_run(tmp_path / "run").findings}
    assert "diverged" not in findings
    assert findings["not_measured"].startswith(
        f"The losses of {TROUBLED} were not all measured in round 1, 2"
    )
    card = make_card(tmp_path / "run").to_markdown()
    assert "no finite loss" not in card
    assert findings["not_measured"] in card


def test_a_run_resumed_without_a_client_of_the_decomposed_round_goes_on(
    small, tmp_path, troubled, monkeypatch
):
    settings = {"method": troubled("later"), "on_client_failure": "skip", "decompose": 2, "rounds": 2}
    original = loop.RoundLoop._advance

    def stop(self):
        if self.state.round == 1:
            raise KeyboardInterrupt
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(loop.RoundLoop, "_advance", stop)
        with pytest.raises(loop.Interrupted):
            run(small(**settings), tmp_path / "run")
    resume(tmp_path / "run")
    _identity_over_the_measured(tmp_path / "run", [TROUBLED])


def test_a_round_of_which_nobody_was_measured_has_no_terms():
    line = {"clients": ["a", "b"], "sizes": [3, 4], "sampled": [0], "cross_loss": [[None], [1.0]]}
    assert decompose_line(line | {"global_losses": [None, 1.0], "not_measured": ["a"]}) is None


def test_a_method_without_a_global_model_has_not_diverged(small, tmp_path):
    run(small(method="local", decompose=1, rounds=1), tmp_path / "run")
    assert [line["global_losses"] for line in read_lines(tmp_path / "run", CROSS_LOSS)] == [None]
    assert "diverged" not in {one.check for one in diagnose_run(tmp_path / "run").findings}


def test_a_passing_fault_is_retried_with_the_same_result(small, tmp_path, troubled, contents):
    run(small(method=troubled("once"), rounds=1), tmp_path / "fault")
    assert FAILED
    run(small(method=troubled("none"), rounds=1), tmp_path / "none")
    assert contents(tmp_path / "fault")["model"] == contents(tmp_path / "none")["model"]


def test_too_few_usable_clients_end_the_run(small, tmp_path, troubled):
    experiment = small(method=troubled("diverges"), min_clients=4)
    with pytest.raises(FedLDError, match=f"3 usable clients, at least 4 needed .{TROUBLED}: the update"):
        run(experiment, tmp_path / "run")
