"""The default settings learn, and a verdict on models that have not learnt says so first."""

import json

import pytest

import fedld
from fedld.records.reader import read
from fedld.study.comparison import compare_runs
from fedld.study.verdict import answers


@pytest.mark.parametrize(("dataset", "least"), [("digits", 0.5), ("fundus-sim", 0.75)])
def test_the_defaults_learn_on_every_built_in_dataset(dataset, least):
    """Chance is 0.1 and 0.5."""
    result = fedld.run("fedavg", dataset, workers=0, client_losses=False, eval_every=15)
    assert result.rounds[-1]["test"]["balanced_accuracy"] > least


def _set_balanced_accuracy(study, method, value):
    for file in study.glob(f"runs/{method}-seed*/rounds.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines:
            line["test"]["balanced_accuracy"] = value
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_verdict_on_models_near_chance_says_that_first(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))
    for method in ("fedavg", "fedld"):
        _set_balanced_accuracy(path, method, 0.52)
    comparison = compare_runs("t", read([path]).runs, "fedavg")
    first = "near chance (50.0 % balanced accuracy): fedavg (52.0 %) and fedld (52.0 %), so train longer"
    assert comparison.verdict.startswith(first)
    assert "fedld beats fedavg" in comparison.verdict or "fedld is ahead" in comparison.verdict
    who = answers(comparison)[0]
    assert (who.answer, who.tone) == ("None has learnt", "unsure")


def test_a_baseline_near_chance_is_named_and_the_winner_stays(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))
    _set_balanced_accuracy(path, "fedavg", 0.5)
    comparison = compare_runs("t", read([path]).runs, "fedavg")
    assert comparison.verdict.startswith("near chance (50.0 % balanced accuracy): fedavg (50.0 %), so")
    assert answers(comparison)[0].answer == "fedld"
