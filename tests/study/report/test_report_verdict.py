"""The comparison against numbers computed here by hand or by SciPy."""

import json
import shutil

import numpy as np
import pytest
from scipy.stats import ttest_rel

from fedld.errors import FedLDError
from fedld.records.reader import read
from fedld.study.comparison import compare_runs
from fedld.study.report.build import build
from fedld.study.verdict import answers


def last(study, method, key):
    lines = [(study / f"runs/{method}-seed{s}/rounds.jsonl").read_text().splitlines()[-1] for s in range(3)]
    return np.array([(one | one["test"])[key] for one in map(json.loads, lines)])


def test_winner_difference_and_significance(study):
    verdict = compare_runs("t", read([study]).runs, "fedavg")
    ours, base = 100 * last(study, "fedld", "accuracy"), 100 * last(study, "fedavg", "accuracy")
    reference = ttest_rel(ours, base)
    interval = reference.confidence_interval()
    assert verdict.winner.label == "fedld"
    assert verdict.winner.mean("accuracy") == pytest.approx(ours.mean())
    assert verdict.winner.difference.interval == pytest.approx((interval.low, interval.high))
    assert verdict.winner.p_value == pytest.approx(min(1, 2 * reference.pvalue))  # the smallest of two
    assert f"{(ours - base).mean():.2f} points" in verdict.verdict


def test_the_term_that_explains_it_adds_up(study):
    found = compare_runs("t", read([study]).runs, "fedavg").explanation
    expected = {
        t: (last(study, "fedld", f"{t}_loss") - last(study, "fedavg", f"{t}_loss")).mean()
        for t in found.terms
    }
    assert found.terms == pytest.approx(expected)
    assert found.total == pytest.approx(
        (last(study, "fedld", "global_loss") - last(study, "fedavg", "global_loss")).mean()
    )
    assert found.term == "shift"


def test_four_answers(study):
    said = answers(compare_runs("t", read([study]).runs, None))
    assert said[0].answer == "fedld"
    assert said[1].answer.startswith("+")
    assert said[2].answer in ("Yes", "No")
    assert said[3].answer == "Shift loss"


def test_a_term_on_which_seeds_do_not_agree_explains_nothing(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))
    for seed, shift in enumerate((-0.5, 0.1, 0.3)):
        file = path / f"runs/fedld-seed{seed}/rounds.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines[-1]["shift_loss"] += shift
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert answers(compare_runs("t", read([path]).runs, None))[3].answer == "None clearly"


def test_a_winning_baseline_is_compared_with_the_next_best(make_study, tmp_path):
    verdict = compare_runs("t", read([make_study(tmp_path / "s")]).runs, "fedld")
    assert verdict.winner.label == verdict.baseline == "fedld"
    assert verdict.rival == "fedprox"
    assert verdict.decisive.label == "fedprox"
    assert "95 % interval +" in answers(verdict)[1].detail or "−" in answers(verdict)[1].detail


def test_pooled_data_are_a_reference_and_cannot_win(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld", "central"))
    for seed in range(3):
        file = path / f"runs/central-seed{seed}/rounds.jsonl"
        lines = [json.loads(line) | {"test": {"accuracy": 0.99}} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = compare_runs("t", read([path]).runs, "fedavg")
    assert [standing.label for standing in verdict.ranked] == ["fedld", "fedavg", "central"]
    assert verdict.ranked[-1].p_value is not None  # it is compared all the same
    assert answers(verdict)[0].detail.endswith("; for reference central 99.00")


def test_seeds_that_only_one_method_has_do_not_decide(make_study, tmp_path):
    path = make_study(tmp_path / "s", methods=("fedavg", "fedld"))
    for name, accuracy in (("fedavg-seed0", 0.92), ("fedld-seed0", 0.90), ("fedld-seed1", 0.99)):
        file = path / "runs" / name / "rounds.jsonl"
        lines = [
            json.loads(line) | {"test": {"accuracy": accuracy}} for line in file.read_text().splitlines()
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("fedavg-seed1", "fedavg-seed2", "fedld-seed2"):
        shutil.rmtree(path / "runs" / name)
    verdict = compare_runs("t", read([path]).runs, "fedavg")
    means = {s.label: s.mean("accuracy") for s in verdict.standings}
    assert means["fedld"] > means["fedavg"]
    assert verdict.verdict.startswith("fedavg is ahead of fedld by 2.00 points with a single seed")


def test_one_seed_has_no_significance(make_study, tmp_path):
    verdict = compare_runs("t", read([make_study(tmp_path / "s", seeds=(4,))]).runs, None)
    assert verdict.decisive.significant is None
    assert answers(verdict)[2].answer == "Cannot say"


def test_one_method_has_nothing_to_compare_with(make_run, tmp_path):
    verdict = compare_runs("t", read([make_run(tmp_path / "r")]).runs, None)
    assert verdict.rival is None
    questions = [answer.question for answer in answers(verdict)]
    assert questions[0] == "How good is it?"
    assert not any("won" in question for question in questions)


def test_other_data_is_never_averaged_in(make_run, tmp_path):
    paths = [make_run(tmp_path / name, dataset=name) for name in ("digits", "retina")]
    groups = build(read(paths))
    assert [group.title.split(",")[0] for group in groups] == ["digits", "retina"]
    assert all(len(group.runs) == 1 for group in groups)


def test_an_unfinished_run_does_not_enter_the_comparison(make_study, tmp_path):
    path = make_study(tmp_path / "s")
    victim = path / "runs/fedld-seed2"
    (victim / "summary.json").unlink()
    lines = (victim / "rounds.jsonl").read_text().splitlines()
    (victim / "rounds.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    study = read([path])
    verdict = compare_runs("t", study.runs, None)
    assert verdict.round == 8
    assert verdict.winner.difference.n == 2
    problems = next(run for run in study.runs if run.path == victim).problems
    assert "rounds.jsonl: 1 damaged line(s) left out" in problems
    assert any("unfinished: 2 of 8 rounds" in problem for problem in problems)


def test_while_all_runs_go_on_they_are_compared_at_their_last_common_round(make_study, tmp_path):
    path = make_study(tmp_path / "s", seeds=(0,))
    for k, run in enumerate(sorted((path / "runs").iterdir())):
        (run / "summary.json").unlink()
        lines = (run / "rounds.jsonl").read_text().splitlines()
        (run / "rounds.jsonl").write_text("\n".join(lines[: 3 + k]) + "\n")
    assert compare_runs("t", read([path]).runs, None).round == 3


def test_same_method_and_seed_twice_are_told_apart(make_run, tmp_path):
    runs = read([make_run(tmp_path / name) for name in ("a", "b")]).runs
    assert [run.label for run in runs] == ["fedavg (a)", "fedavg (b)"]


def test_no_run_is_one_sentence(tmp_path):
    with pytest.raises(FedLDError, match="neither a run nor a study"):
        read([tmp_path])
