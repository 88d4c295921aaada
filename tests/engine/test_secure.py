"""Runs in which the server sees sums alone: the plain run's model within the fixed-point error."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedld.aggregation import CountSketch, MatrixSource, Measured, Vote, column_specs, combine_updates
from fedld.engine.loop import run
from fedld.errors import FedLDError


def model(path):
    return torch.cat([tensor.flatten().double() for tensor in load_file(path / "model.safetensors").values()])


def lines(path, name):
    return [json.loads(line) for line in (path / f"{name}.jsonl").open()]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedadam", "scaffold", "feddyn"])
def test_a_secure_run_gives_the_plain_runs_model(small, tmp_path, method):
    settings = {"rounds": 2, "method": method, "client_losses": False}
    run(small(**settings), tmp_path / "plain")
    run(small(**settings, secure="sum"), tmp_path / "secure")
    plain, secure = model(tmp_path / "plain"), model(tmp_path / "secure")
    torch.testing.assert_close(secure, plain, rtol=1e-4, atol=1e-6)
    for line in (tmp_path / "secure/clients.jsonl").read_text().splitlines():
        assert "update_norm" not in json.loads(line)
    assert (
        not (tmp_path / "secure/conflict.jsonl").exists()
        or not (tmp_path / "secure/conflict.jsonl").read_text()
    )


def test_losses_of_training_are_known_as_means_over_all_clients(small, tmp_path):
    run(small(rounds=1), tmp_path / "plain")
    run(small(rounds=1, secure="sum"), tmp_path / "secure")
    (plain,), (secure,) = (lines(tmp_path / name, "rounds") for name in ("plain", "secure"))
    assert secure["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-6)
    clients = lines(tmp_path / "plain", "clients")
    images = sum(line["before"]["count"] for line in clients)
    for when in ("before", "after"):
        mean = sum(line[when]["count"] * line[when]["loss"] for line in clients) / images
        assert secure[f"client_loss_{when}"] == pytest.approx(mean, abs=1e-6)
    told = {
        "round",
        "client",
        "index",
        "size",
        "label_counts",
        "seconds",
        "digest",
    }  # the digest is of the line
    assert [set(line) for line in lines(tmp_path / "secure", "clients")] == [told] * len(clients)


def test_models_of_single_clients_are_not_measured(small, tmp_path):
    run(small(rounds=1, method="ditto", secure="sum", client_losses=False), tmp_path / "run")
    (line,) = lines(tmp_path / "run", "rounds")
    assert "personal" not in line
    assert "test" in line
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["sites"], summary["cases"]) == ({}, {})


@pytest.mark.parametrize("method", ["fedavg", "fedld-drift"])
def test_candidates_are_chosen_by_sums_of_losses(small, tmp_path, method):
    rule = {"name": "measured", "rules": "mean", "margin": 0.5, "lengths": "0.5,1,2"}
    settings = {"rounds": 2, "method": method, "rule": rule, "client_losses": False}
    run(small(**settings), tmp_path / "plain")
    run(small(**settings, secure="sum"), tmp_path / "secure")
    torch.testing.assert_close(model(tmp_path / "secure"), model(tmp_path / "plain"), rtol=1e-4, atol=1e-6)
    trials = [json.loads(line)["trial"] for line in (tmp_path / "plain/conflict.jsonl").open()]
    choices = [json.loads(line)["choices"] for line in (tmp_path / "secure/rounds.jsonl").open()]
    for trial, chosen in zip(trials, choices, strict=True):
        assert chosen["step"] == trial["lengths"][trial["chosen"]]
        assert chosen["measured_gain"] == pytest.approx(trial["gain"], abs=1e-6)


def test_too_few_votes_for_a_sum_take_the_average():
    unknown = np.full(2, np.nan)
    trial = Measured(rules="mean", lengths="2").choose_by_sums(unknown, unknown, 0.0, {"a": "it is away"})
    assert trial.chosen == 0
    assert trial.fallback is not None


def test_the_spread_of_summed_votes_is_that_of_single_ones():
    votes = {
        "a": Vote(count=9, losses=(1.0, 0.8), squares=(0.0, 0.2)),
        "b": Vote(count=30, losses=(0.5, 0.6), squares=(0.0, 0.1)),
        "c": Vote(count=20, losses=(0.7, 0.4), squares=(0.0, 0.3)),
    }
    p = {"a": 0.2, "b": 0.5, "c": 0.3}
    rule = Measured(rules="mean", lengths="2")
    single = rule.choose(votes, p)
    losses = sum(p[name] * np.array(vote.losses) for name, vote in votes.items())
    variances = sum(p[name] ** 2 * vote.variances for name, vote in votes.items())
    summed = rule.choose_by_sums(losses, variances, 1.0, {})
    assert summed.losses == pytest.approx(single.losses)
    assert summed.errors == pytest.approx(single.errors)
    assert (summed.chosen, summed.rules) == (single.chosen, single.rules)


@pytest.mark.parametrize("method", ["ridge", "lda", "newton", "regmean"])
def test_closed_forms_are_solved_from_secure_sums(small, tmp_path, method):
    settings = {"method": method, "train": "head", "head": "linear", "rounds": 2, "client_losses": False}
    run(small(**settings), tmp_path / "plain")
    run(small(**settings, secure="sum"), tmp_path / "secure")
    torch.testing.assert_close(model(tmp_path / "secure"), model(tmp_path / "plain"), rtol=1e-4, atol=1e-5)
    lines = [
        [json.loads(x) for x in (tmp_path / name / "rounds.jsonl").open()] for name in ("plain", "secure")
    ]
    for plain, secure in zip(*lines, strict=True):
        assert secure.get("choices", {}) == pytest.approx(plain.get("choices", {}))


def test_the_moments_of_a_standardised_head_and_a_closed_start_are_sums(small, tmp_path):
    settings = {"train": "head", "head": "linear", "start": "closed", "rounds": 1, "client_losses": False}
    run(small(**settings), tmp_path / "plain")
    run(small(**settings, secure="sum"), tmp_path / "secure")
    torch.testing.assert_close(model(tmp_path / "secure"), model(tmp_path / "plain"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": "consensus"}, "needs single updates"),
        ({"method": "fedld"}, "needs single updates"),
        ({"method": "fednova"}, "needs single updates"),
        ({"method": "fedld-drift"}, "rules = 'mean' and vote = 'mean' need sums alone"),
        ({"decompose": 1}, "decompose"),
        ({"validation": 0.2}, "every client would tell its validation loss"),
        ({"clients": 2}, "at least 3 clients"),
    ],
)
def test_what_needs_single_updates_is_refused_before_the_run(small, tmp_path, changes, problem):
    with pytest.raises(FedLDError, match=problem):
        run(small(**{"secure": "sum", **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_secure_sum_and_differential_privacy_go_together(small, tmp_path):
    pytest.importorskip("opacus")
    private = {"dp": "epsilon=8,delta=1e-5,clip=1", "client_losses": False, "local_steps": 1, "rounds": 1}
    run(small(secure="sum", partition="iid", **private), tmp_path / "run")


GRAM = {"secure": "gram", "clients": 5, "rounds": 2, "client_losses": False}


def conflicts(path):
    return [json.loads(line) for line in (path / "conflict.jsonl").open()]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", ["consensus", "fedld", "fedgh"])
def test_rules_of_inner_products_give_the_plain_model_of_the_same_sketch(
    small, tmp_path, monkeypatch, method, seed
):
    run(small(**GRAM, method=method, seed=seed), tmp_path / "secure")
    lines = conflicts(tmp_path / "secure")
    sketches = iter([CountSketch(line["sketch"]["buckets"], line["sketch"]["seed"]) for line in lines])

    def sketched(updates, rule, **options):
        matrix = updates.source.matrix  # a sketch takes columns by tensor name, else in their order
        source = MatrixSource(matrix, column_specs((("update", matrix.shape[1]),)))
        return combine_updates(replace(updates, source=source, sketch=next(sketches)), rule, **options)

    monkeypatch.setattr("fedld.methods.base.combine_updates", sketched)
    run(small(**{**GRAM, "secure": None}, method=method, seed=seed), tmp_path / "plain")
    secure, plain = model(tmp_path / "secure"), model(tmp_path / "plain")
    assert (secure - plain).norm() < 1e-4 * plain.norm()  # keys are fresh: so are sketches, and rounding
    for secure, plain in zip(lines, conflicts(tmp_path / "plain"), strict=True):
        lengths = np.array(plain["norms"])
        scales = {"gram": np.outer(lengths, lengths), "norms": lengths, "norm_ratio": plain["norm_ratio"]}
        for key in ("gram", "norms", "cosines", "norm_ratio", "cosine"):  # rounding errors scale with lengths
            difference = np.abs(np.subtract(secure[key], plain[key]))
            assert np.max(difference / scales.get(key, 1.0)) < 1e-3, key
        c = [np.array(line["coefficients"]["model"]) for line in (secure, plain)]
        assert np.abs(c[0] - c[1]).max() < 1e-3 * np.abs(c[1]).max()


@pytest.mark.parametrize("rule", ["norm-clip", "geometric-median"])
def test_robust_rules_see_inner_products_alone(small, tmp_path, rule):
    run(small(**{**GRAM, "rounds": 1}, rule=rule), tmp_path / "run")
    assert len(conflicts(tmp_path / "run")[0]["gram"]) == 5
    lines = [json.loads(line) for line in (tmp_path / "run/clients.jsonl").open()]
    assert all(line["update_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": "median"}, "rule 'median' needs more than inner products"),
        ({"method": "fedld-measured"}, "rule 'measured' needs more than inner products"),
        ({"method": "fedld-tensor"}, "granularity 'tensor' needs more than one matrix"),
        ({"rule": "geometric-median", "model": "resnet8"}, "median of clients' BatchNorm statistics"),
        ({"method": "fednova"}, "needs single updates"),
        ({"clients": 4}, "at least 5 clients"),
    ],
)
def test_what_needs_more_than_inner_products_is_refused_before_the_run(small, tmp_path, changes, problem):
    with pytest.raises(FedLDError, match=problem):
        run(small(**{**GRAM, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_rule_that_picks_one_update_ends_the_run(small, tmp_path):
    with pytest.raises(FedLDError, match="fewer than 3 sites have a coefficient that matters"):
        run(small(**GRAM, rule="krum"), tmp_path / "run")
