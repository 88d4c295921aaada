"""What a page must not say: one seed's diagnosis as everybody's, a lead that is a rate, green for worse."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from fedld.analysis.diagnosis.gather import diagnose_all, merge_sentences
from fedld.analysis.intervals import Estimate
from fedld.analysis.sites import SiteResult
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.records.reader import read
from fedld.study.comparison import compare_runs
from fedld.study.progress import round_text
from fedld.study.reasons import tune_command
from fedld.study.report.build import build
from fedld.study.report.chart import looks
from fedld.study.report.tables import comparison_table
from fedld.study.sites import sites_apart


def rewrite(study, method, name, change):
    """Change the lines of a record file in every seed of a method."""
    for seed, run in enumerate(sorted(study.glob(f"runs/{method}-seed*"))):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        text = "".join(json.dumps(change(line, seed)) + "\n" for line in lines)
        (run / name).write_text(text)


def scores(line, **values):
    return line | {"test": line["test"] | values}


def test_numbers_of_one_wording_are_means_with_their_spread():
    one, other = "client_2 loses 0.10 in round 5 (25%).", "client_2 loses -0.30 in round 5 (35%)."
    assert merge_sentences([one, other]) == ("client_2 loses -0.10 ± 0.28 in round 5 (30.0 ± 7.1%).", 2)
    classes = ["2 classes are never predicted: 1, 3", "2 classes are never predicted: 0, 3"]
    assert merge_sentences(classes) == (classes[0], 1)  # names, which have no mean
    assert merge_sentences([one, one, "client_3 loses 0.10 in round 5 (25%)."]) == (one, 2)


def test_the_account_of_the_loss_is_over_all_seeds(make_study, tmp_path):
    """The aggregation term is positive in the first seed and negative in the two others."""
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))

    def aggregate(line, seed):
        costs = (0.02, -0.05, -0.06)[seed]
        matrix = line["cross_loss"]
        means = [sum(row) / len(row) for row in matrix]
        return line | {"sizes": [10] * len(means), "global_losses": [mean + costs for mean in means]}

    rewrite(path, "fedavg", "cross_loss.jsonl", aggregate)
    found = [one for one in diagnose_all(read([path]).runs) if one.finding.check == "dominant_term"]
    first = next(one for one in found if "fedavg" in one.holds)
    assert len(found) == 2
    assert "aggregation -0.030 ± 0.044" in first.finding.sentence
    assert "aggregation is below 0 in 2 of 3 seeds" in first.finding.sentence
    assert first.finding.sentence.startswith("fedavg, round ")


def test_a_finding_says_of_which_methods_and_in_how_many_seeds(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))

    def unlucky(line, seed):
        return scores(line, balanced_accuracy=0.5 if seed == 1 else 0.8)

    rewrite(path, "fedld", "rounds.jsonl", unlucky)
    found = {one.finding.check: one for one in diagnose_all(read([path]).runs)}
    assert found["nothing_learned"].where == "fedld: 1 of 3 seeds"
    assert found["opposed_groups"].where == "all methods, all 3 seeds"
    page = build(read([path]))[0]
    assert {one.finding.check for one in page.findings} == set(found)


def test_a_rising_curve_is_told_on_the_first_screen_with_the_command_that_tunes(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"), rounds=10)
    rewrite(
        path, "fedavg", "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.5 + 0.03 * line["round"])
    )
    rewrite(path, "fedld", "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.9))
    comparison = compare_runs("t", read([path]).runs, "fedavg")
    (said,) = [line for line in comparison.warnings if "tune" in line]
    assert said.startswith(
        "the accuracy of fedavg (+6.00 points) still rises over the last fifth of the rounds"
    )
    assert said.endswith(tune_command(comparison.runs[0]))
    rewrite(path, "fedavg", "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.8))
    assert not [line for line in compare_runs("t", read([path]).runs, "fedavg").warnings if "tune" in line]


@pytest.mark.parametrize(("length", "word"), [(2.0, "short"), (0.5, "long"), (1.0, "")])
def test_steps_of_another_length_that_clients_measured_speak_against_the_rate(
    make_study, tmp_path, length, word
):
    path = make_study(tmp_path / "s", methods=("fedavg", "measured"))
    trial = {"rules": ["mean", "mean"], "lengths": [1.0, length], "losses": [1, 0.9], "errors": [0, 0.1]}
    trial |= {"chosen": 1, "gain": 0.1, "votes": {}, "left_out": {}, "fallback": None}
    rewrite(path, "measured", "conflict.jsonl", lambda line, seed: line | {"trial": trial})
    rewrite(path, "fedavg", "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.8))
    rewrite(path, "measured", "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.85))
    said = [line for line in compare_runs("t", read([path]).runs, "fedavg").warnings if "tune" in line]
    assert bool(said) == bool(word)
    if word:
        first = f"the clients of measured measured steps of {length:g} times the average's length as best"
        assert said[0].startswith(f"{first}, so the steps of fedavg are too {word}")


def test_the_command_that_is_offered_runs(tmp_path, monkeypatch):
    settings = {"dataset": "digits", "clients": 2, "rounds": 1, "workers": 0, "lr": 0.04}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(make_experiment(settings).to_toml())
    monkeypatch.chdir(tmp_path)
    words = shlex.split(tune_command(read([run]).runs[0]))
    assert words[-1] == "lr=0.01,0.02,0.04,0.08,0.16"
    answer = CliRunner().invoke(app, [*words[1:], "--trials", "1"])
    assert answer.exit_code == 0, answer.output


def test_p_values_have_the_colour_of_their_difference(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld", "fedprox"))
    for method, base in (("fedavg", 0.7), ("fedld", 0.9), ("fedprox", 0.5)):
        rewrite(
            path,
            method,
            "rounds.jsonl",
            lambda line, seed, b=base: scores(line, accuracy=b + 0.001 * seed * b),
        )
    comparison = compare_runs("t", read([path]).runs, "fedavg")
    table = comparison_table(comparison, looks(["fedavg", "fedld", "fedprox"]))
    column = table.columns.index("p (Holm)")
    assert {row[0].text: row[column].tone for row in table.rows} == {
        "fedld": "good",
        "fedavg": "",
        "fedprox": "bad",
    }


def test_a_method_that_does_nothing_is_named_with_its_numbers(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedprox"))
    for method in ("fedavg", "fedprox"):
        rewrite(path, method, "rounds.jsonl", lambda line, seed: scores(line, accuracy=0.8, loss=0.4))
    said = compare_runs("t", read([path]).runs, "fedavg").warnings[-1]
    assert said.startswith("fedprox has the same accuracy as fedavg in every seed: its own term hardly does")
    assert "mu = " in said


def test_the_console_tells_test_loss_and_training_loss_apart():
    line = {"round": 3, "test": {"accuracy": 0.5, "loss": 1.2}, "global_loss": 0.9, "local_loss": 0.7}
    terms = {"shift_loss": 0.3, "aggregation_loss": -0.1}
    expected = "test loss 1.200  training loss 0.900 = 0.700 local +0.300 shift -0.100 aggregation"
    assert round_text(line | terms).endswith(expected)


def test_a_methods_colour_is_the_same_on_every_page():
    one, other = looks(["fedld", "fedavg", "mine"]), looks(["mine", "scaffold", "fedprox", "fedld"])
    assert one["fedld"] == other["fedld"]
    assert one["mine"] == other["mine"]
    everybody = looks([f"method {k}" for k in range(12)])
    assert len({look.slot for look in everybody.values()}) == 12


def test_an_auroc_over_all_sites_that_no_site_has_is_explained():
    def result(auroc):
        return SiteResult(
            pictures=100,
            patients=None,
            accuracy=Estimate(0.8),
            auroc=Estimate(auroc),
            sensitivity=Estimate(0.5),
        )

    said = sites_apart(result(0.919), {"a": result(0.43), "b": result(0.55), "c": result(None)})
    assert "is 0.919" in said
    assert "(a 0.430, b 0.550): the model may tell sites apart" in said
    assert sites_apart(result(0.919), {"a": result(0.9)}) is None
    assert sites_apart(result(0.919), {}) is None
