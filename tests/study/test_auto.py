"""`fedld auto`: the method to use, found on held-out images within given minutes."""

import json
import math
import time

import pytest
from typer.testing import CliRunner

import fedld
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.errors import FedLDError
from fedld.records.reader import read_run
from fedld.study import auto as module
from fedld.study import grid
from fedld.study.auto import AutoTrial, auto, candidates
from fedld.study.grid import Cell, attempt, run_cell

TINY = {
    "dataset": "fundus-sim",
    "data": {"samples": 240},
    "image_size": 8,
    "clients": 2,
    "rounds": 2,
    "lr": 0.01,
    "model": "cnn",
    "train": "head",
}


@pytest.fixture
def two(monkeypatch):
    """Only FedAvg and a method that is the same with equal clients."""
    monkeypatch.setattr(module, "TRAINED", ("fedavg", "fednova"))
    monkeypatch.setattr(module, "CLOSED", {})


def test_a_frozen_trunk_allows_closed_forms_and_a_given_rate_is_the_only_one():
    found = [candidate.label for candidate in candidates(TINY)]
    assert found[:4] == ["ridge", "lda", "ridge, random units", "fedavg, lr 0.01"]
    assert len(found) == 7
    free = [candidate.method for candidate in candidates({"model": "cnn"})]
    assert "ridge" not in free
    assert free.count("fedavg") == 4


def test_the_winner_is_trained_on_everything_and_the_test_set_is_read_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRAINED", ("fedavg",))
    monkeypatch.setattr(module, "CLOSED", {name: {"name": name} for name in ("ridge", "lda")})
    result = auto(TINY, tmp_path, minutes=60, jobs=0)
    tried = {trial.label for trial in result.trials}
    assert tried == {"ridge", "lda", "fedavg, lr 0.01"}
    for folder in (tmp_path / "trials").iterdir():
        assert read_run(folder).config["hold_out"] == module.HOLD_OUT
    final = read_run(tmp_path / "final")
    assert "hold_out" not in final.config
    assert len(final.scores("accuracy")) == 1
    assert result.difference is not None
    assert result.chosen in ("ridge", "lda") if result.difference.interval[0] > 0 else "fedavg, lr 0.01"
    assert json.loads((tmp_path / "auto.json").read_text())["chosen"] == result.chosen
    assert "| ridge | 1 | 1 |" in (tmp_path / "auto.md").read_text()
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("**/rounds.jsonl")}
    again = auto(TINY, tmp_path, minutes=60, jobs=0, resume=True)
    assert again.chosen == result.chosen
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("**/rounds.jsonl")}


def test_where_pretrained_blocks_are_trained_the_recipe_and_smaller_rates_are_tried(tmp_path):
    settings = {**TINY, "model": "mobilenet_v2", "weights": tmp_path / "w.safetensors", "train": "last:2"}
    del settings["lr"]
    tried = {candidate.label: candidate for candidate in candidates(settings)}
    assert tried["ridge"].settings["train"] == "head"
    recipe = make_experiment({**settings, **tried["scaffold, centred, lr 0.001"].settings})
    assert (recipe.start, recipe.steps, recipe.buffers, recipe.local_steps) == (
        "closed",
        "centred",
        "frozen",
        4,
    )
    assert recipe.method == {"name": "scaffold", "beta": 0.9}
    assert "fedavg, lr 0.0003" in tried
    assert "fedavg, lr 0.1" not in tried
    own = {candidate.family: candidate for candidate in candidates({**settings, "local_steps": 9})}
    assert "local_steps" not in own["fedavgm, centred"].settings
    for other in ({"buffers": "global"}, {"optimiser": "adam"}, {"augment": "xray"}, {"head": "mlp:8"}):
        assert not any("centred" in c.label for c in candidates({**settings, **other}))


def test_a_method_that_is_best_at_the_end_of_its_rates_is_tried_beyond_it(two, tmp_path):
    settings = {key: value for key, value in TINY.items() if key != "lr"}
    search = module._Search(settings, tmp_path, 60.0, None, 0, lambda event: None)
    by_rate = {"fedavg": (0.5, 0.6, 0.7, 0.8), "fednova": (0.5, 0.8, 0.7, 0.6)}
    scores = {
        f"{name}, lr {rate:g}": AutoTrial(label="x", rounds=1, scores={0: score}, seconds=0.1, megabytes=0.1)
        for name, values in by_rate.items()
        for rate, score in zip(module.RATES, values, strict=True)
    }
    assert [c.label for c in search._next_rates(scores)] == ["fedavg, lr 0.3"]
    more = search._beyond(scores, 1, keep=0.0)
    assert next(iter(more)) == "fedavg, lr 0.3"
    assert len(more) <= module.BEYOND
    assert search._beyond(scores, 1, keep=1e9) == {}
    given = module._Search(TINY, tmp_path / "given", 60.0, None, 0, lambda event: None)
    assert given._beyond({}, 1, keep=0.0) == {}


def test_what_is_not_surely_better_than_fedavg_is_not_chosen(two, tmp_path):
    result = fedld.auto({**TINY, "partition": "iid"}, minutes=60, jobs=0, out=tmp_path)
    assert result.chosen == "fedavg, lr 0.01"
    assert result.reason.startswith("no method is significantly better than fedavg, lr 0.01")
    assert result.measures["accuracy"] is not None


def test_too_few_minutes_are_refused_with_the_least_that_is_needed(two, tmp_path, monkeypatch):
    monkeypatch.setattr(
        module._Search,
        "_tried",
        lambda self, chosen, rounds: {
            chosen[0].label: AutoTrial(label="x", rounds=1, scores={}, seconds=60.0, megabytes=1.0)
        },
    )
    with pytest.raises(
        FedLDError, match=r"1 minutes are too few .* 2 candidates: at least \d+\.?\d* are needed"
    ):
        auto(TINY, tmp_path, minutes=1, jobs=1)


def test_what_it_cannot_do_is_a_sentence(tmp_path):
    with pytest.raises(FedLDError, match="auto chooses the method"):
        auto({**TINY, "method": "fedavg"}, tmp_path, minutes=1)
    (tmp_path / "trials").mkdir()
    with pytest.raises(FedLDError, match="already holds a search"):
        auto(TINY, tmp_path, minutes=1)
    result = CliRunner().invoke(app, ["auto", "--dataset", "digits", "--out", str(tmp_path)])
    assert isinstance(result.exception, FedLDError)


def test_a_failed_trial_counts_for_nothing():
    assert (
        AutoTrial(label="x", rounds=1, scores={0: 0.9, 1: None}, seconds=1.0, megabytes=1.0).mean == -math.inf
    )


def test_a_run_ends_before_the_round_that_its_time_does_not_allow(tmp_path, monkeypatch):
    experiment = make_experiment({**TINY, "train": "all", "method": "fedavg", "rounds": 5, "workers": 0})
    clock = iter([0.0, 0.0, *[0.0, 1e9] * 9])
    monkeypatch.setattr(grid.time, "time", lambda: next(clock))
    why = attempt(
        Cell(label="fedavg", experiment=experiment, path=tmp_path / "run", until=1e6), lambda event: None
    )
    assert why == "its time was over after round 2 of 5"
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.undo()
    assert (
        run_cell(Cell(label="fedavg", experiment=experiment, path=tmp_path / "run"), lambda event: None)[
            "rounds"
        ]
        == 5
    )


def test_nothing_is_begun_when_the_time_is_over(tmp_path):
    experiment = make_experiment({**TINY, "method": "fedavg", "workers": 0})
    cell = Cell(label="fedavg", experiment=experiment, path=tmp_path / "run", until=time.time() - 1)
    assert attempt(cell, lambda event: None) == "no time was left for it"
    assert not (tmp_path / "run").exists()


def test_minutes_that_end_with_the_first_trial_are_refused_and_more_of_them_go_on(two, tmp_path):
    settings = {**TINY, "train": "all"}
    with pytest.raises(FedLDError, match=r"0.0001 minutes are too few for the first of 2 trials"):
        auto(settings, tmp_path, minutes=0.0001, jobs=0)
    assert auto(settings, tmp_path, minutes=60, jobs=0, resume=True).chosen.startswith("fed")


def test_a_final_training_takes_the_rounds_that_there_is_time_for(two, tmp_path, monkeypatch):
    search = module._Search({**TINY, "rounds": 20}, tmp_path, 1.0, None, 0, lambda event: None)
    search.trials = [
        AutoTrial(label="fedavg, lr 0.01", rounds=5, scores={0: 0.5}, seconds=25.0, megabytes=1.0)
    ]
    chosen = next(c for c in search.candidates if c.method == "fedavg")
    assert 7 <= search._fitting(chosen, 20) <= 9  # 55 s, 6 s a round
    monkeypatch.setattr(search, "end", time.time() - 1)
    assert search._fitting(chosen, 20) == 1
    result = search._train(chosen, None, "for a test")
    assert result.reason.startswith("for a test; the time allowed 1 of 20 rounds")
    assert result.measures["accuracy"] is not None
