"""The ledger: chained, found out when changed, whole after a kill at any moment."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fedld.cli.ledger import ledger as command
from fedld.errors import FedLDError
from fedld.records.ledger import START, Ledger


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "ledger.jsonl")
    for k in range(4):
        made.append("order", round=k, left={"update": [[3], 12]}, who="site é")
    return made


def test_lines_are_chained(ledger):
    found = ledger.check()
    assert found.problem is None
    assert [entry["n"] for entry in found.entries] == [1, 2, 3, 4]
    hashes = [START, *(entry["hash"] for entry in found.entries)]
    assert [entry["previous"] for entry in found.entries] == hashes[:-1]
    assert ledger.head() == hashes[-1]
    assert ledger.file.stat().st_mode & 0o077 == 0


def test_every_changed_byte_is_found(ledger):
    content = ledger.file.read_bytes()
    ends = [k for k, byte in enumerate(content) if byte == ord("\n")]
    for place in range(len(content)):
        ledger.file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = ledger.check()
        if place == len(content) - 1:
            assert found.torn
        else:
            assert found.problem.startswith(f"line {1 + sum(end < place for end in ends)} ")


def test_lines_taken_out_are_found(ledger):
    head, lines = ledger.head(), ledger.file.read_bytes().splitlines(keepends=True)
    ledger.file.write_bytes(b"".join([*lines[:1], *lines[2:]]))
    assert "line 2 does not follow" in ledger.check().problem
    ledger.file.write_bytes(b"".join(lines[:3]))
    assert ledger.check().problem is None
    result = CliRunner().invoke(command, ["verify", str(ledger.file), "--head", head])
    assert "missing at its end" in str(result.exception)


def test_a_torn_end_is_cut_off_and_said(ledger):
    content = ledger.file.read_bytes()
    ledger.file.write_bytes(content[:-7])
    assert ledger.check().torn
    ledger.append("order", round=9)
    kinds = [entry["kind"] for entry in ledger.check().entries]
    assert kinds == ["order"] * 3 + ["torn", "order"]


def test_nothing_is_added_after_a_changed_line(ledger):
    lines = ledger.file.read_text().splitlines()
    entry = json.loads(lines[-1]) | {"round": 7}
    ledger.file.write_text("\n".join([*lines[:-1], json.dumps(entry, separators=(",", ":"))]) + "\n")
    with pytest.raises(FedLDError, match="was changed"):
        ledger.append("order")


def test_a_long_line_is_found_again(ledger):
    ledger.append("order", names=["x" * 200_000])
    ledger.append("order")
    assert ledger.check().problem is None


def test_it_is_whole_after_kills(tmp_path):
    """Two writers at a time, killed at any moment: the chain goes on."""
    file = tmp_path / "ledger.jsonl"
    code = (
        "import sys; from pathlib import Path; from fedld.records.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "while True: ledger.append('order', names=['x' * 5000])\n"
    )
    for pause in (0.02, 0.05):
        writers = [subprocess.Popen([sys.executable, "-c", code, str(file)]) for _ in range(2)]
        while not file.exists() or file.stat().st_size < 50_000:
            time.sleep(0.01)
        time.sleep(pause)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        Ledger(file).append("between")
        found = Ledger(file).check()
        assert found.problem is None
        assert not found.torn


def test_the_command_names_the_line(ledger, tmp_path):
    runner = CliRunner()
    assert "4 lines are whole" in runner.invoke(command, ["verify", str(tmp_path)]).output
    shown = runner.invoke(command, ["show", str(tmp_path), "--last", "1"]).output
    assert len(shown.splitlines()) == 1
    assert "order" in shown
    assert "round 3" in shown
    ledger.file.write_text(ledger.file.read_text().replace('"round":2', '"round":3'))
    result = runner.invoke(command, ["verify", str(ledger.file)])
    assert isinstance(result.exception, FedLDError)
    assert "line 3 was changed" in str(result.exception)
