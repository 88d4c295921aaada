import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedld.cli import app
from fedld.config.experiment import make_experiment, read_toml
from fedld.config.resolve import make_data_spec, make_method
from fedld.data import load
from fedld.engine import loop
from fedld.engine.backends.machine import THIS_MACHINE
from fedld.errors import FedLDError
from fedld.study.tune import SearchRange, apply, ranges_of, tune

SETTINGS = {"dataset": "digits", "clients": 3, "model": "cnn", "rounds": 2, "workers": 0, "method": "fedld"}


def test_the_test_set_is_never_read():
    real = load(make_data_spec(make_experiment(SETTINGS)))
    held = THIS_MACHINE.federation(make_experiment(SETTINGS | {"hold_out": 0.25}))
    trained = np.concatenate([client.train for client in real.clients])
    assert not set(held.test) & set(real.test)
    assert set(held.test) <= set(trained)
    assert not set(held.test) & set(np.concatenate([client.train for client in held.clients]))


def test_a_search_is_repeatable_and_its_recommendation_runs(tmp_path):
    first = tune(SETTINGS, tmp_path / "a", minutes=5, trials=3, only=["lr", "lam"])
    again = tune(SETTINGS, tmp_path / "b", minutes=5, trials=3, only=["lr", "lam"])
    assert [t.values for t in first.trials] == [t.values for t in again.trials]
    assert [t.score for t in first.trials] == [t.score for t in again.trials]
    assert first.trials[0].values == {}  # the settings as they are
    assert set(first.trials[1].values) == {"lr", "lam"}
    assert first.best.score == max(t.score for t in first.trials)
    written = json.loads((tmp_path / "a/tune.json").read_text())
    assert len(written["trials"]) == 3
    recommended = make_experiment(read_toml(tmp_path / "a/tuned.toml"))
    assert recommended == make_experiment(apply(SETTINGS, first.best.values))
    summary = loop.run(recommended, tmp_path / "run")
    assert summary["test"]["final"]["accuracy"] > 0


def test_a_grid_is_searched_whole_and_a_stopped_search_continues(tmp_path, capfd):
    grid = {"lr": (0.02, 0.1)}
    first = tune(SETTINGS, tmp_path / "a", minutes=5, trials=1, grid=grid)
    with pytest.raises(FedLDError, match="already holds a search"):
        tune(SETTINGS, tmp_path / "a", minutes=5, grid=grid)
    done = (tmp_path / "a/trials/000-seed0/summary.json").stat().st_mtime_ns
    whole = tune(SETTINGS, tmp_path / "a", minutes=5, grid=grid, resume=True)
    assert sorted(trial.values["lr"] for trial in whole.trials) == [0.02, 0.1]
    assert whole.trials[0].score == first.trials[0].score
    assert (tmp_path / "a/trials/000-seed0/summary.json").stat().st_mtime_ns == done
    capfd.readouterr()
    with pytest.raises(FedLDError, match="holds a run with other settings"):
        tune(SETTINGS | {"hold_out": 0.3}, tmp_path / "a", minutes=5, grid=grid, resume=True)
    assert "Traceback" not in capfd.readouterr().err, "the sentence is enough"
    with pytest.raises(FedLDError, match="no 'mu' to tune"):
        tune(SETTINGS, tmp_path / "b", minutes=5, grid={"mu": (0.1,)})
    asked = ["tune", "--dataset", "digits", "--grid", "lr=fast", "--out", str(tmp_path / "c")]
    assert "lr: input should be a valid number" in str(CliRunner().invoke(app, asked).exception)


def test_any_setting_is_searched_and_bad_ones_are_refused_first(tmp_path):
    ranges = {"batch_size": SearchRange(20, 40), "method.mu": SearchRange(0.01, 1.0)}
    few = SETTINGS | {"method": "fedprox", "rounds": 1}
    found = tune(few, tmp_path / "a", minutes=5, trials=2, ranges=ranges)
    tried = found.trials[1].values
    assert isinstance(tried["batch_size"], int)
    assert 20 <= tried["batch_size"] <= 40
    saved = make_experiment(read_toml(tmp_path / "a/trials/001-seed0/config.toml"))
    assert (saved.batch_size, saved.method["mu"]) == (tried["batch_size"], tried["method.mu"])
    grid = tune(few, tmp_path / "b", minutes=5, grid={"lr_schedule": ("constant", "cosine")})
    assert sorted(trial.values["lr_schedule"] for trial in grid.trials) == ["constant", "cosine"]
    for words, sentence in (
        (["--grid", "momentum=2"], "momentum: input should be less than 1"),
        (["--grid", "momentums=0.5"], "unknown setting 'momentums'"),
        (["--range", "momentum=0.5"], "--range wants NAME=NUMBER..NUMBER"),
        (["--range", "momentum=0.9..0.1"], "nothing lies between"),
        (["--range", "momentum=0.1..0.9", "--only", "lr"], "exclude each other"),
    ):
        asked = ["tune", "--dataset", "digits", *words, "--out", str(tmp_path / "c")]
        assert sentence in str(CliRunner().invoke(app, asked).exception)
    assert not (tmp_path / "c").exists()


def test_another_measure_decides_among_the_same_trials(tmp_path):
    asked = {"minutes": 5, "grid": {"lr": (0.001, 0.1)}, "seeds": (0, 1)}
    first = tune(SETTINGS, tmp_path / "a", **asked)
    done = (tmp_path / "a/trials/000-seed0/summary.json").stat().st_mtime_ns
    by = {
        measure: tune(SETTINGS, tmp_path / "a", primary=measure, resume=True, **asked)
        for measure in ("auroc", "worst_client")
    }
    assert (tmp_path / "a/trials/000-seed0/summary.json").stat().st_mtime_ns == done, "nothing is run twice"
    for number, trial in enumerate(by["auroc"].trials):
        rounds = [
            json.loads(line)
            for seed in (0, 1)
            for line in (tmp_path / f"a/trials/{number:03d}-seed{seed}/rounds.jsonl").read_text().splitlines()
        ]
        assert trial.score == pytest.approx(np.mean([line["test"]["auroc"] for line in rounds]))
        assert first.trials[number].score == pytest.approx(
            np.mean([line["test"]["accuracy"] for line in rounds])
        )
        worst = np.mean([line["test"]["worst_client"] for line in rounds])
        assert by["worst_client"].trials[number].score == pytest.approx(worst)
    assert by["auroc"].best.score == max(trial.score for trial in by["auroc"].trials)
    assert json.loads((tmp_path / "a/tune.json").read_text())["primary"] == "worst_client"
    assert "# Validation worst_client 0." in (tmp_path / "a/tuned.toml").read_text()
    with pytest.raises(FedLDError, match="did you mean 'auroc'"):
        tune(SETTINGS, tmp_path / "b", primary="aurocc", **asked)
    with pytest.raises(FedLDError, match="tuned by its own models' accuracy"):
        tune(SETTINGS | {"method": "local"}, tmp_path / "b", primary="auroc", **asked)
    assert not (tmp_path / "b").exists()


def test_of_a_measure_of_which_less_is_better_the_least_wins(tmp_path, monkeypatch):
    (tmp_path / "mine_errors.py").write_text(
        "import fedld\nfrom fedld.tasks.metrics import as_metric\n"
        "wrong = as_metric(lambda logits, labels: (logits.argmax(1) != labels).float())\n"
        "errors = fedld.Metric(wrong.sums, wrong.value, better='less')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["tune", "--dataset", "digits", "--clients", "3", "--rounds", "2", "--workers", "0"]
    asked += [
        "--model",
        "cnn",
        "--metric",
        "mine_errors:errors",
        "--primary",
        "errors",
        "--grid",
        "lr=0.001,0.1",
    ]
    answer = CliRunner().invoke(app, [*asked, "--json", "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output or answer.exception
    found = json.loads(answer.stdout)
    scores = {trial["values"]["lr"]: trial["score"] for trial in found["trials"]}
    assert scores[0.1] < scores[0.001]
    assert found["best"]["values"] == {"lr": 0.1}


def test_dials_follow_the_method():
    assert set(ranges_of(SETTINGS)) == {"lr", "lam", "components"}
    assert set(ranges_of(SETTINGS | {"method": "fedprox"})) == {"lr", "mu"}
    assert set(ranges_of(SETTINGS | {"method": "fedavg"})) == {"lr"}
    with pytest.raises(FedLDError, match="no 'mu' to tune"):
        ranges_of(SETTINGS, ["mu"])


def test_values_go_where_they_belong():
    smooth = make_method(make_experiment(apply(SETTINGS | {"method": "fedld-smooth"}, {"components": 0.4})))
    assert (smooth.rule.components, smooth.rule.conflict) == (0.4, "smooth")
    tensor = make_method(make_experiment(apply(SETTINGS | {"method": "fedld-tensor"}, {"components": 0.6})))
    assert (tensor.rule.components, tensor.granularity) == (0.6, "tensor")
    assert make_method(make_experiment(apply(SETTINGS | {"method": "fedprox"}, {"mu": 0.5}))).mu == 0.5


def test_a_diverging_trial_is_recorded_and_all_failing_is_an_error(tmp_path):
    hopeless = SETTINGS | {"lr": 1e30, "model": "resnet8", "rounds": 1}
    with pytest.raises(FedLDError, match="no trial finished"):
        tune(hopeless, tmp_path / "a", minutes=5, trials=1, only=["lr"])


def test_the_command(tmp_path):
    asked = ["tune", "--dataset", "digits", "--clients", "3", "--rounds", "1", "--workers", "0"]
    asked += ["--method", "fedprox", "--trials", "2", "--json"]
    answer = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "out")])
    assert answer.exit_code == 0, answer.output or answer.exception
    trials = json.loads(answer.stdout)["trials"]
    assert [set(trial["values"]) for trial in trials] == [set(), {"lr", "mu"}]


def test_a_folder_that_cannot_be_written_to_fails_once(tmp_path):
    """It failed 500 times in a minute."""
    (tmp_path / "file").write_text("mine")
    told = []
    with pytest.raises(FedLDError, match=r"cannot write to .*file"):
        tune(SETTINGS, tmp_path / "file", minutes=1, progress=told.append)
    assert told == []
    assert (tmp_path / "file").read_text() == "mine"
