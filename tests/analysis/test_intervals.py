"""Intervals against their definitions, computed the long way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from sklearn.metrics import roc_auc_score

from fedld.analysis.intervals import (
    accuracy_interval,
    auroc_interval,
    log_odds,
    sensitivity_interval,
)
from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

Z = float(ndtri(0.975))
SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(1, 500), st.data())
def test_wilsons_ends_solve_the_score_equation(n, data):
    hits = data.draw(st.integers(0, n))
    found = accuracy_interval([True] * hits + [False] * (n - hits))
    assert 0 <= found.low <= found.value <= found.high <= 1
    for end in (found.low, found.high):
        if 0 < end < 1:
            assert abs(hits / n - end) == pytest.approx(Z * (end * (1 - end) / n) ** 0.5, rel=1e-6, abs=1e-9)
    assert found.high - found.low > 0


@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(2, 4))
def test_the_same_picture_many_times_is_no_surer(hits, times):
    """Each patient with copies of one picture: as sure as one picture each, up to a share of 1 / patients."""
    once = accuracy_interval(hits, [str(k) for k in range(len(hits))])
    copies = accuracy_interval(np.repeat(hits, times), np.repeat([str(k) for k in range(len(hits))], times))
    assert copies.value == pytest.approx(once.value)
    assert (copies.low, copies.high) == pytest.approx((once.low, once.high))
    wider = accuracy_interval(hits)
    assert once.high - once.low >= wider.high - wider.low - 1e-12


def drawn(seed, n, classes, ties):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.repeat(np.arange(classes), 2), rng.integers(0, classes, n)])
    scores = rng.normal(size=(len(labels), classes)) + 0.7 * np.eye(classes)[labels]
    return (np.round(scores) if ties else scores), labels


def delong(scores, positive):
    """Area and variance over all pairs."""
    above, below = scores[positive], scores[~positive]
    kernel = (above[:, None] > below[None]) + 0.5 * (above[:, None] == below[None])
    placed = (kernel.mean(1).var(ddof=1) / len(above)) + (kernel.mean(0).var(ddof=1) / len(below))
    return kernel.mean(), placed


@given(SEEDS, st.integers(0, 40), st.booleans())
def test_delong_is_that_of_all_pairs(seed, n, ties):
    scores, labels = drawn(seed, n, 2, ties)
    scores = scores[:, 1] - scores[:, 0]
    area, variance = delong(scores, labels == 1)
    found = auroc_interval(np.stack([-scores, scores], 1), labels)
    assert found.value == pytest.approx(area)
    assert found.value == pytest.approx(roc_auc_score(labels, scores))
    if variance < 1e-12 or not 0 < area < 1:
        assert found.low is None
    else:
        logit = np.log(area / (1 - area))
        half = Z * variance**0.5 / (area * (1 - area))
        ends = [1 / (1 + np.exp(-(logit + sign * half))) for sign in (-1, 1)]
        assert (found.low, found.high) == pytest.approx(ends)


def test_many_classes_are_as_sure_as_a_bootstrap_says():
    """The influences of three classes add up to the variance that drawing anew shows."""
    scores, labels = drawn(0, 400, 3, False)
    found = auroc_interval(scores, labels)
    rng, areas = np.random.default_rng(1), []
    for _ in range(300):
        rows = rng.integers(0, len(labels), len(labels))
        areas.append(auroc_interval(scores[rows], labels[rows]).value)
    assert found.high - found.low == pytest.approx(2 * Z * np.std(areas), rel=0.15)


def test_patients_with_copies_widen_the_area():
    scores, labels = drawn(3, 60, 2, False)
    names = [str(k) for k in range(len(labels))]
    alone = auroc_interval(scores, labels)
    copies = auroc_interval(np.repeat(scores, 3, 0), np.repeat(labels, 3), np.repeat(names, 3))
    blind = auroc_interval(np.repeat(scores, 3, 0), np.repeat(labels, 3))
    assert copies.high - copies.low == pytest.approx(alone.high - alone.low, rel=0.05)
    assert blind.high - blind.low < 0.7 * (alone.high - alone.low)


def sensitivity(scores, positive, specificity):
    """The lowest threshold by trying every one."""
    for threshold in np.sort(scores[~positive]):
        if np.mean(scores[~positive] <= threshold) >= specificity - 1e-9:
            return np.mean(scores[positive] > threshold)
    raise AssertionError


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(2, 25), st.sampled_from([0.5, 0.8, 0.9, 1.0]), st.booleans(), st.booleans())
def test_the_bootstrap_is_that_of_a_loop(seed, n, specificity, ties, patients):
    scores, labels = drawn(seed, n, 2, ties)
    scores, positive = scores[:, 1], labels == 1
    groups = np.array([f"p{k}" for k in np.random.default_rng(seed).integers(0, 6, len(scores))])
    found = sensitivity_interval(scores, positive, specificity, groups if patients else None, draws=20)
    assert found.value == pytest.approx(sensitivity(scores, positive, specificity))
    order = np.argsort(scores, kind="stable")
    names = np.unique(groups, return_inverse=True)[1] if patients else np.arange(len(scores))
    count, values = names.max() + 1, []
    for times in numpy_generator(0, "bootstrap", len(scores)).multinomial(
        count, np.full(count, 1 / count), 20
    ):
        rows = np.repeat(order, times[names[order]])
        if positive[rows].any() and not positive[rows].all():
            values.append(sensitivity(scores[rows], positive[rows], specificity))
    low, high = np.quantile(values, [0.025, 0.975])
    hits = round(found.value * positive.sum())
    rows = np.repeat([True, False], [hits, positive.sum() - hits])
    if not patients:
        fixed = accuracy_interval(rows)
        low, high = min(low, fixed.low), max(high, fixed.high)
        assert (found.low, found.high) == pytest.approx((low, high))
    assert found.low <= low + 1e-12
    assert found.high >= high - 1e-12


def test_what_cannot_be_said_is_none():
    assert accuracy_interval([]).value is None
    assert auroc_interval([[0.1, 0.9]], [1]).value is None
    assert auroc_interval([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [3.0, 0.0]], [0, 1, 1, 0]).low is None
    assert sensitivity_interval([0.1, 0.2], [True, True]).value is None
    assert sensitivity_interval([np.nan, 0.2], [True, False]).value is None
    with pytest.raises(FedLDError, match="specificity"):
        sensitivity_interval([0.1, 0.2], [True, False], 1.5)


def test_log_odds_do_not_saturate():
    odds = log_odds(np.array([[1.0, 1e-20], [1.0, 1e-30], [0.5, 0.5]]))
    assert odds[1, 0] > odds[0, 0] > odds[2, 0] == 0
    np.testing.assert_allclose(odds[:, 0], -odds[:, 1])
