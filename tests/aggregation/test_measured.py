"""The rule `measured`: candidates, votes, and what happens when clients fail, lie or disagree."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.aggregation import Measured, Vote, aggregate
from fedld.errors import FedLDError


def measured(updates, sizes, measure, **options):
    """The three steps of the rule: propose, let `measure` ask the clients, choose."""
    first = aggregate(updates, sizes, "measured", propose=True, **options)
    weights = dict(zip(first.report.clients, first.report.weights, strict=True))
    trial = first.rule.choose(measure(first.candidates), weights)
    return aggregate(updates, sizes, "measured", trial=trial, **options)


def quadratic(targets, curvatures, samples=64):
    """Clients with losses curvature |step - target|^2 / 2, measured exactly."""

    def measure(candidates):
        steps = torch.tensor(candidates.coefficients, dtype=torch.float64) @ candidates.basis.double()
        votes = {}
        for k, (target, curvature) in enumerate(zip(targets, curvatures, strict=True)):
            losses = curvature * (steps - target).square().sum(1) / 2
            squares = (losses - losses[0]).square()
            votes[str(k)] = Vote(samples, tuple(losses.tolist()), tuple(squares.tolist()))
        return votes

    return measure


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 8), st.floats(0.05, 1))
def test_the_measured_loss_is_never_above_the_averages(seed, m, d, reach):
    """L(measured) <= L(FedAvg) from the same point, for any clients: the average is a candidate."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(m, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    curvatures = torch.rand(m, generator=generator, dtype=torch.float64) + 0.1
    sizes = (torch.rand(m, generator=generator) * 90 + 10).round().tolist()
    updates = reach * targets  # every client goes a part of its own way
    measure = quadratic(targets, curvatures)
    p = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)

    def loss(step):
        return float(p @ (curvatures * (step - targets).square().sum(1) / 2))

    found = measured(updates, sizes, measure)
    average = aggregate(updates, sizes, "mean")
    assert loss(found.update) <= loss(average.update) + 1e-12
    trial = found.report.trial
    assert trial.losses[trial.chosen] == min(trial.losses)
    assert trial.gain == pytest.approx(loss(average.update) - loss(found.update), abs=1e-12)


def test_timid_clients_make_a_longer_step():
    """All want the same point and go a quarter of the way: four times the average is the optimum."""
    target = torch.tensor([1.0, 2.0], dtype=torch.float64)
    updates = torch.stack([target / 4, target / 4])
    result = measured(updates, [1, 1], quadratic([target, target], [1.0, 1.0]))
    assert torch.allclose(result.update, target)
    assert result.report.norm_ratio == pytest.approx(4)


def test_the_optimum_is_a_fixed_point():
    """Where the clients' pulls balance, no candidate moves: every length of a zero step is zero."""
    pull = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    result = measured(pull, [1, 1], quadratic(pull, [1.0, 1.0]))
    assert result.update.abs().max() < 1e-9


def answers(*votes):
    return lambda candidates: {str(k): vote for k, vote in enumerate(votes)}


def vote(*losses, squares=None):
    full = (*losses, *(5.0,) * (5 - len(losses)))
    return Vote(10, full, tuple(squares or (1.0,) * 5))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("it timed out", "it timed out"),
        (vote(math.nan), "not between"),
        (vote(1e30, 1e30), "not between"),
        (vote(1.0, -3.0), "not between"),
        (Vote(10, (1.0,), (0.0,)), "incomplete"),
    ],
)
def test_a_vote_that_cannot_be_true_is_left_out_and_named(bad, reason):
    good = vote(1.0, 0.5)
    result = measured(torch.eye(3), [1, 1, 1], answers(good, bad, good))
    trial = result.report.trial
    assert trial.chosen == 1
    assert reason in trial.left_out["1"]
    assert set(trial.votes) == {"0", "2"}


def test_below_quorum_the_average_is_taken_and_the_record_says_so():
    result = measured(torch.eye(3), [1, 1, 1], answers(vote(1.0, 0.5), "gone", "gone"))
    assert torch.allclose(result.update, torch.full((3,), 1 / 3))
    assert "33% of the clients' weight" in result.report.trial.fallback


def test_a_gain_within_its_error_is_no_gain():
    noisy = [vote(1.0, 0.99, squares=(0.0, *(4.0,) * 4))] * 2
    kept = measured(torch.eye(2), [1, 1], answers(*noisy), margin=1.0)
    moved = measured(torch.eye(2), [1, 1], answers(*noisy))
    assert kept.report.trial.chosen == 0
    assert moved.report.trial.chosen == 1
    assert kept.report.trial.errors[1] == pytest.approx(math.sqrt(2 * 0.25 * (4 - 1e-4) / 9))


def test_a_liar_moves_the_mean_but_not_the_median():
    honest, liar = vote(1.0, 0.8), vote(0.0, 20.0)
    votes = answers(honest, honest, honest, liar)
    assert measured(torch.eye(4), [1] * 4, votes).report.trial.chosen != 1
    robust = measured(torch.eye(4), [1] * 4, votes, vote="median")
    assert robust.report.trial.chosen == 1
    assert robust.report.trial.votes["3"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": "0,1"}, "length of 0"),
        ({"lengths": "nan"}, "length of nan"),
        ({"lengths": "one"}, "not a list of numbers"),
        ({"lengths": "1", "rules": "mean"}, "no candidate beside the average"),
        ({"rules": "", "lengths": ""}, "no candidate beside the average"),
        ({"rules": "median"}, "no rule of the Gram matrix"),
        ({"rules": "meen"}, "did you mean 'mean'"),
        ({"samples": 0}, "samples = 0"),
        ({"unseen": 0.6}, "unseen = 0.6"),
        ({"vote": "majority"}, "vote = 'majority'"),
    ],
)
def test_bad_candidates_are_named_before_anybody_is_asked(options, words):
    with pytest.raises(FedLDError, match=words):
        Measured(**options)


def test_without_clients_to_ask_it_says_so():
    with pytest.raises(FedLDError, match="asks clients"):
        aggregate(np.eye(2), [1, 1], "measured")
