"""Records that were changed: whoever reads them says which file and line, and does not use it."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

import fedld
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.engine.loop import Interrupted, resume, run
from fedld.records.chain import checked, last_digest, sealed, split
from fedld.records.reader import read, read_run
from fedld.records.schema import ROUNDS
from fedld.records.writer import RunDirectory, read_lines
from fedld.study.card import make_card
from fedld.study.comparison import compare_runs
from fedld.study.report import write_report

TINY = {"dataset": "digits", "clients": 3, "rounds": 3, "model": "cnn", "workers": 0, "decompose": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("chain") / "run"
    run(make_experiment(TINY), out)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def change(folder, name, line, old=b'"loss":', new=b'"loss":1'):
    lines = (folder / name).read_bytes().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    (folder / name).write_bytes(b"".join(lines))


def test_a_chain_names_changed_and_missing_lines():
    lines, digest = [], ""
    for k in range(4):
        text, digest = sealed(json.dumps({"round": k}).encode(), digest)
        lines.append(text)
    assert [verdict for _, verdict in checked(lines)] == ["sound"] * 4
    changed = [lines[0], lines[1].replace(b"1", b"7", 1), *lines[2:]]
    assert [verdict for _, verdict in checked(changed)] == ["sound", "changed", "sound", "sound"]
    assert [verdict for _, verdict in checked([lines[0], *lines[2:]])] == ["sound", "changed", "sound"]
    bare = split(lines[2])[0]
    assert [verdict for _, verdict in checked([*lines[:2], bare])][-1] == "changed"


def test_runs_of_older_versions_have_no_digests_and_are_read(copy):
    for name in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        file = copy / name
        file.write_bytes(b"".join(split(line)[0] + b"\n" for line in file.read_bytes().splitlines()))
    summary = json.loads((copy / "summary.json").read_text())
    del summary["sha256"]
    (copy / "summary.json").write_text(json.dumps(summary))
    found = read_run(copy)
    assert found.problems == ()
    assert [line["round"] for line in found.rounds.lines] == [1, 2, 3]


def test_a_changed_number_is_told_by_everybody_who_reads_the_run(copy, tmp_path):
    change(copy, "rounds.jsonl", 2)
    sentence = "rounds.jsonl: line 2 changed since the run wrote it"
    found = read_run(copy)
    assert [line["round"] for line in found.rounds.lines] == [1, 3]
    assert sentence in found.problems[0]
    write_report([copy], tmp_path / "page.html")
    assert sentence in (tmp_path / "page.html").read_text()
    assert any(sentence in line for line in make_card(copy).limitations)
    with pytest.warns(UserWarning, match=sentence):
        fedld.load(copy)
    comparison = compare_runs("t", read([copy]).runs)
    assert [run.path for run in comparison.failed] == [copy]
    assert sentence in comparison.warnings[0]
    told = []
    resume(copy, warn=told.append)
    assert sentence in told[0]


@pytest.mark.parametrize("name", ["clients.jsonl", "conflict.jsonl", "cross_loss.jsonl"])
def test_the_other_records_are_checked_too(copy, name):
    change(copy, name, 1, b'"clients":' if name != "clients.jsonl" else b'"seconds":', b'"x":')
    assert any(f"{name}: line 1 changed" in problem for problem in read_run(copy).problems)


def test_lines_that_are_missing_at_the_end_are_noticed(copy):
    lines = (copy / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "rounds.jsonl").write_bytes(b"".join(lines[:-1]))
    assert "rounds.jsonl was changed after the run had finished" in str(read_run(copy).problems)


def test_a_changed_summary_is_not_believed_and_is_written_again(copy):
    """--resume prints its accuracy."""
    change(copy, "summary.json", 1, b'"accuracy":0.', b'"accuracy":1.')
    found = read_run(copy)
    assert not found.finished
    assert "summary.json is damaged or was changed" in str(found.problems)
    assert found.failure is not None
    told = []
    resume(copy, warn=told.append)
    assert "summary.json' is damaged" in told[0]
    assert read_run(copy).problems == ()


def test_a_card_of_changed_predictions_is_refused(copy):
    change(copy, "predictions.csv", 2, b",", b", ")
    result = CliRunner().invoke(app, ["card", str(copy)])
    assert "predictions.csv was changed after the run had finished" in str(result.exception)


def test_a_directory_that_is_opened_again_goes_on_with_the_chain(tmp_path):
    for part in ([1, 2], [3]):
        directory = RunDirectory(tmp_path)
        for k in part:
            directory.append(ROUNDS, {"round": k, "bytes_up": 0, "bytes_down": 0})
        directory.close()
    content = (tmp_path / "rounds.jsonl").read_bytes()
    assert [verdict for _, verdict in checked(content.splitlines())] == ["sound"] * 3
    assert last_digest(tmp_path / "rounds.jsonl") == split(content.splitlines()[-1])[1]
    os.truncate(tmp_path / "rounds.jsonl", len(content.splitlines(keepends=True)[0]))
    directory = RunDirectory(tmp_path)
    directory.append(ROUNDS, {"round": 2, "bytes_up": 0, "bytes_down": 0})
    directory.close()
    assert read_run(tmp_path).rounds.problem is None


def test_a_run_that_is_stopped_and_resumed_has_one_chain(tmp_path):
    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(make_experiment(TINY), tmp_path / "run", progress=stop)
    resume(tmp_path / "run")
    assert read_run(tmp_path / "run").problems == ()
    assert [line["round"] for line in read_lines(tmp_path / "run", ROUNDS)] == [1, 2, 3]
