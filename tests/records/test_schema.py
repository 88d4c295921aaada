"""Schema and engine tell the same story: all that is written is known, all that is known is written."""

import json
from dataclasses import fields

import pytest

from fedld.aggregation.measured import Trial
from fedld.aggregation.report import Report
from fedld.config.experiment import make_experiment
from fedld.engine.hardware import changed, environment
from fedld.engine.loop import Interrupted, resume, run
from fedld.records import schema
from fedld.records.chain import FIELD
from fedld.records.reader import read_run
from fedld.records.schema import (
    FILES,
    ConflictLine,
    Environment,
    Predictions,
    Summary,
)

TINY = {"dataset": "digits", "clients": 3, "rounds": 1, "model": "cnn", "workers": 0, "local_epochs": 1}
# What only some runs have, and where it comes from.
OPTIONAL = {
    *("excluded", "reason", "missing", "not_measured"),  # a client that was left out
    "choices",  # methods in closed form
    *("client_loss_before", "client_loss_after"),  # secure sums
    "metrics",  # methods that measure something of their own
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that have all parts between them: exact terms, estimated terms, personalised models."""
    folder = tmp_path_factory.mktemp("runs")
    parts = {"decompose": 1, "decompose_samples": 16, "validation": 0.1}
    run(make_experiment(TINY | {"method": "fedavg"} | parts), folder / "a")
    parts = {"rule": "measured", "metrics": ["kappa"], "hold_out": 0.2}  # clients with test sets of their own
    run(make_experiment(TINY | {"method": "fedbn"} | parts), folder / "b")
    return [folder / "a", folder / "b"]


def lines(folder, name):
    texts = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    assert all(text.pop(FIELD) for text in texts)
    return texts


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_written_is_in_the_schema_and_what_is_in_the_schema_is_written(runs, file):
    known = set(file.line.__annotations__)
    written = {
        key for one in runs if (one / file.name).exists() for line in lines(one, file.name) for key in line
    }
    assert written <= known
    assert known - written <= OPTIONAL


def test_documents_match_the_schema(runs):
    summaries = [line for one in runs for line in lines(one, "summary.json")]
    assert set().union(*summaries) == set(Summary.__annotations__)
    assert set(summaries[0]["environment"]) == set(Environment.__annotations__)
    predictions = json.loads((runs[0] / "predictions.json").read_text())
    assert set(predictions) == set(Predictions.__annotations__)


def test_a_conflict_line_is_a_report_with_its_round_and_clients():
    own = {"round", "sampled", "gram_clients"}
    assert set(ConflictLine.__annotations__) == {f.name for f in fields(Report)} | own
    assert set(schema.TrialRecord.__annotations__) == {f.name for f in fields(Trial)}


def test_the_environment_is_known_from_the_first_moment_and_named_when_it_changes(tmp_path):
    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(make_experiment(TINY | {"rounds": 2}), out, progress=stop)
    begun = read_run(out).environment
    assert begun == environment()
    said: list[str] = []
    (out / "environment.json").write_text(json.dumps(begun | {"instructions": "AVX9000"}))
    resume(out, warn=said.append)
    (sentence,) = said
    assert "instructions AVX9000 before" in sentence
    assert changed(begun, begun) is None
