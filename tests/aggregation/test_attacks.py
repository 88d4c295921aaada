"""What one dishonest client can do: claim a size, send a long or reversed update, spoil statistics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.aggregation import RULES, aggregate, location_of, make_rule, statistic_problem
from fedld.aggregation.robust import capped
from fedld.errors import FedLDError

ROBUST = sorted(name for name, rule in RULES.items() if rule.robust)
RNG = np.random.default_rng(0)
TRUTH = RNG.normal(size=40)
HONEST = TRUTH + 0.2 * RNG.normal(size=(6, 40))


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("factor", [-1.0, -1e3, -1e7])
def test_a_sign_flipper_cannot_turn_a_robust_rule_around_by_its_size(rule, factor):
    """It claims twice as many images as all others together."""
    G = np.vstack([HONEST, factor * TRUTH])
    result = aggregate(G, [1] * 6 + [12], rule, clients=[*"abcdef", "liar"])
    assert cosine(result.update, TRUTH) > 0.8
    assert np.linalg.norm(result.update) < 1.5 * np.linalg.norm(TRUTH)
    assert result.report.capped == pytest.approx({"liar": 2 / 3})
    assert max(result.report.weights) == pytest.approx(0.4)


def test_weights_are_capped_for_robust_rules_or_on_demand():
    assert aggregate(HONEST, [1] * 5 + [20], "mean").report.capped == {}
    assert aggregate(HONEST, [1] * 5 + [20], "mean", max_weight=0.3).report.weights[-1] == pytest.approx(0.3)
    assert aggregate(HONEST, [1] * 5 + [20], "median", max_weight=1.0).report.capped == {}
    assert aggregate(HONEST[:2], [1, 9], "median").report.weights == [0.5, 0.5]
    with pytest.raises(FedLDError, match=r"max_weight = 1\.5 is not a share"):
        aggregate(HONEST, [1] * 6, max_weight=1.5)


@given(sizes=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), most=st.floats(0.01, 1.0))
@settings(max_examples=200, deadline=None)
def test_capped_weights(sizes, most):
    p = np.array(sizes) / sum(sizes)
    found = capped(p, most)
    assert found.sum() == pytest.approx(1)
    assert found.max() <= max(most, 1 / len(p)) * (1 + 1e-9)
    order = np.argsort(p)
    assert (np.diff(found[order]) >= -1e-12).all()  # nobody overtakes a larger client
    if p.max() <= most:
        assert np.array_equal(found, p)


def test_trimmed_mean_trims_at_least_one():
    G = np.array([[1.0], [2.0], [3.0], [1e9]])
    assert aggregate(G, [1] * 4, "trimmed-mean").update == pytest.approx([2.5])
    assert aggregate(G, [1] * 4, "trimmed-mean", trim=0.0).update > 1e8


def test_a_long_update_does_not_choose_whom_the_cosine_filter_compares_with():
    G = np.vstack([HONEST, -1e3 * TRUTH])
    coefficients = aggregate(G, [1] * 7, "cosine-filter").report.coefficients["model"]
    assert coefficients == pytest.approx([1 / 6] * 6 + [0])


def test_outlier_pruning_does_not_follow_whoever_holds_most_of_the_data():
    """With weighted median and deviation this gave client 0's update exactly."""
    G = RNG.normal(size=(4, 50))
    found = aggregate(G, [60, 20, 10, 10], "outlier-pruned").update
    assert np.linalg.norm(found - G[0]) > 0.3 * np.linalg.norm(G[0])
    wild = np.vstack([[100.0] * 5, np.ones((3, 5)) * [[1.0], [1.1], [0.9]]])
    assert aggregate(wild, [60, 20, 10, 10], "outlier-pruned").update == pytest.approx([1.0] * 5, rel=0.05)


def test_sizes_that_overflow_are_an_error():
    with pytest.raises(FedLDError, match="the sizes add up to more than a number can hold"):
        aggregate(HONEST, [1.5e308] * 6)


def test_length_and_direction_outliers_are_named():
    G = np.vstack([HONEST, 100 * TRUTH, -TRUTH])
    names = [*"abcdef", "long", "backwards"]
    report = aggregate(G, [1] * 8, "mean", clients=names).report
    assert {(found.client, found.kind) for found in report.outliers} == {
        ("long", "length"),
        ("backwards", "direction"),
    }
    long, backwards = report.outliers
    assert long.value == pytest.approx(100, rel=0.2)
    assert "long: its update is" in str(long)
    assert backwards.value < -0.8
    assert report.to_json()["outliers"][0]["client"] == "long"


@given(seed=st.integers(0, 10_000), m=st.integers(4, 30), spread=st.floats(0.0, 0.5))
@settings(max_examples=60, deadline=None)
def test_ordinary_clients_are_not_called_outliers(seed, m, spread):
    """Log-normal lengths around a common direction."""
    rng = np.random.default_rng(seed)
    G = rng.normal(size=200) + rng.normal(size=(m, 200))
    G *= np.exp(spread * rng.uniform(-1, 1, size=(m, 1)))
    assert aggregate(G, [1] * m, "mean").report.outliers == []


def test_too_long_an_update_is_refused_by_name_on_demand():
    G = np.vstack([HONEST, 11 * TRUTH])
    assert aggregate(G, [1] * 7, "mean").report.rejected == {}
    result = aggregate(G, [1] * 7, "mean", max_update_ratio=10, report=True)
    assert list(result.report.rejected) == ["6"]
    assert "times as long as the median, more than 10 times is refused" in result.report.rejected["6"]
    assert np.allclose(result.update, HONEST.mean(axis=0))
    assert np.array_equal(
        aggregate(G, [1] * 7, "mean", max_update_ratio=10, report=False).update, result.update
    )
    with pytest.raises(FedLDError, match=r"max_update_ratio = 0\.5 is not a number of at least 1"):
        aggregate(G, [1] * 7, max_update_ratio=0.5)


def test_callers_refusals_are_reported():
    result = aggregate(HONEST, [1] * 6, "mean", refused={"2": "its variance is negative"})
    assert result.report.rejected == {"2": "its variance is negative"}
    assert np.allclose(result.update, np.delete(HONEST, 2, axis=0).mean(axis=0))


@pytest.mark.parametrize("rule", ROBUST)
def test_statistics_under_robust_rules_are_a_median(rule):
    """A harmless update with harmful statistics: no weight that follows from updates could help."""
    values = torch.tensor([[0.1, 1.0], [0.2, 1.1], [0.0, 0.9], [1e6, 1e9]])
    p = torch.tensor([0.1, 0.1, 0.1, 0.7])
    found = location_of(make_rule(rule), values, p)
    assert 0.0 <= found[0] <= 0.2
    assert 0.9 <= found[1] <= 1.1
    assert location_of(make_rule("mean"), values, p)[0] > 1e5


def test_problems_of_statistics():
    assert (
        statistic_problem("bn.running_var", torch.tensor([1.0, -0.1]))
        == "its variance 'bn.running_var' is negative"
    )
    assert statistic_problem("bn.running_mean", torch.tensor([1.0, -0.1])) is None
    assert "not finite" in statistic_problem("bn.running_mean", torch.tensor([float("inf")]))
    assert statistic_problem("bn.num_batches_tracked", torch.tensor(3)) is None
