"""The comparison's table: exact numbers, columns apart, what is missing stays missing."""

import csv

import pytest
from scipy.stats import ttest_rel

from fedld.errors import FedLDError
from fedld.study.compare import write_comparison
from fedld.study.comparison import compare_runs

ACCURACY = {"fedavg": (0.80, 0.82, 0.80), "fedld": (0.81, 0.84, 0.83), "fedbn": (0.70, 0.71, 0.72)}


@pytest.fixture
def comparison(write_run):
    runs = [write_run(m, s, accuracy=a) for m, values in ACCURACY.items() for s, a in enumerate(values)]
    runs += [write_run("local", s, personal_accuracy=0.6) for s in range(3)]
    return compare_runs("t", runs, "fedavg")


def test_differences_are_paired_by_seed_and_corrected(comparison):
    rows = {row["label"]: row for row in comparison.to_json()["rows"]}
    assert rows["fedavg"]["difference"] is None
    assert rows["fedld"]["difference"] == pytest.approx(2.0)
    assert rows["fedld"]["interval"] == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert rows["fedld"]["p_value"] == pytest.approx(0.0742, abs=1e-3)  # the larger of two: Holm leaves it
    assert rows["fedbn"]["p_value"] == pytest.approx(2 * ttest_rel([70, 71, 72], [80, 82, 80]).pvalue)
    assert rows["fedld"]["effect_size"] == pytest.approx(2.0 * (1 - 3 / 7))  # sd 1, Hedges' correction
    assert rows["fedavg"]["megabytes"] == 3.0


def test_global_and_personalised_accuracy_never_share_a_column(comparison):
    rows = {row["label"]: row for row in comparison.to_json()["rows"]}
    assert rows["fedbn"]["final"] == pytest.approx([70, 71, 72])
    assert rows["local"]["final"] is None
    assert rows["local"]["personal"] == pytest.approx([60, 60, 60])
    _, *body = comparison.table
    assert next(row for row in body if row[0] == "local")[1] == "-"


def test_the_verdict_says_what_happened_to_every_method(comparison):
    assert comparison.verdict == (
        "fedld is ahead of fedavg by 2.00 points, but not significantly; fedbn is 9.67 points behind; "
        "local trains no global model"
    )
    assert comparison.warnings == [
        "3 paired seeds: take 5 or more before you believe a difference or its absence"
    ]


def test_a_level_winner_does_not_hide_a_loser(write_run):
    runs = [write_run("fedavg", s, accuracy=0.9) for s in range(5)]
    runs += [write_run("fedprox", s, accuracy=0.9) for s in range(5)]
    runs += [write_run("fedld", s, accuracy=0.6 + 0.001 * s) for s in range(5)]
    comparison = compare_runs("t", runs, "fedavg")
    assert comparison.verdict == "fedavg and fedprox are level; fedld is 29.80 points behind"
    (hint,) = comparison.warnings
    assert hint.startswith("fedprox has the same accuracy as fedavg in every seed")


def test_a_winner_that_is_worse_elsewhere_is_not_praised_without_saying_so(write_run):
    runs = [write_run("fedavg", s, accuracy=0.9, auroc=0.96, loss=0.3) for s in range(5)]
    runs += [write_run("fedld", s, accuracy=0.92 + s / 1000, auroc=0.94, loss=0.5) for s in range(5)]
    comparison = compare_runs("t", runs, "fedavg")
    assert comparison.verdict.endswith("yet is worse in AUROC (−0.0200) and loss (+0.2000)")


def test_the_primary_measure_decides(write_run):
    runs = [write_run("fedavg", s, accuracy=0.9, balanced_accuracy=0.6) for s in range(5)]
    runs += [write_run("fedld", s, accuracy=0.8, balanced_accuracy=0.7 + s / 1000) for s in range(5)]
    assert compare_runs("t", runs, "fedavg").winner.label == "fedavg"
    comparison = compare_runs("t", runs, "fedavg", "balanced_accuracy")
    assert comparison.winner.label == "fedld"
    assert comparison.verdict == (
        "fedld beats fedavg by 10.20 points of balanced accuracy, yet is worse in accuracy (−10.00)"
    )
    assert comparison.table[0][1] == "balanced accuracy, %"
    with pytest.raises(FedLDError, match="unknown primary measure 'f1'"):
        compare_runs("t", runs, "fedavg", "f1")


def test_a_class_that_is_never_predicted_is_named(write_run):
    runs = [write_run("fedavg", s, confusion=((6, 0, 0), (6, 0, 0)), accuracy=0.5) for s in range(2)]
    runs += [write_run("fedld", s, accuracy=0.8) for s in range(2)]
    (never, _) = compare_runs("t", runs, "fedavg").warnings
    assert never.startswith("fedavg never predicts 'ill' (in 2 of 2 seeds): the comparison rests on")


def test_fedbn_without_batchnorm_is_told_apart_from_fedbn(write_run):
    runs = [write_run("fedavg", 0, accuracy=0.5), write_run("fedbn", 0, accuracy=0.5, private=0)]
    assert "fedbn is FedAvg here" in compare_runs("t", runs, "fedavg").warnings[-1]


def test_every_format_has_every_method(comparison, tmp_path):
    rows = list(csv.DictReader(comparison.to_csv().splitlines()))
    assert {row["method"] for row in rows} == {*ACCURACY, "local"}
    (fedld,) = (r for r in rows if (r["method"], r["seed"], r["measure"]) == ("fedld", "1", "accuracy"))
    assert float(fedld["value"]) == 84.0
    tex = comparison.to_latex("made by us")
    assert tex.startswith("% t\n% made by us\n\\begin{tabular}{l")
    assert "80.67 $\\pm$ 1.15" in tex
    assert "| fedld | 82.67 ± 1.53 |" in comparison.to_markdown()


def test_markdown_escapes_names_and_csv_runs_no_formula(write_run):
    from dataclasses import replace

    run = replace(write_run("fedavg", 0, accuracy=0.5), label="=a|b")
    comparison = compare_runs("t", [run], "=a|b")
    assert "=a\\|b" in comparison.to_markdown()
    assert "\n'=a|b,0,accuracy,50.0" in comparison.to_csv()


def test_names_in_markdown_are_no_html(write_run, tmp_path):
    """A method of one's own, or a data set, called <img src=...> was one in table.md."""
    from dataclasses import replace

    evil = "<img src=x onerror=alert(1)>"
    run = replace(write_run("fedavg", 0, accuracy=0.5), label=evil)
    write_comparison(compare_runs(evil, [run], evil), tmp_path, f"fedld compare `{evil}`")
    text = (tmp_path / "table.md").read_text()
    assert "<img" not in text
    assert text.count("&lt;img src=x onerror=alert(1)>") >= 4  # title, rows of two tables, command
