import numpy as np
import pytest

from fedld.aggregation import aggregate
from fedld.analysis.updates import gram_report, split, update_measures
from fedld.errors import FedLDError


def updates(seed=0, m=6, d=40):
    return np.random.default_rng(seed).normal(size=(m, d)) + 0.3


def test_update_measures_against_the_vectors_themselves():
    G, n = updates(), np.array([1.0, 2, 3, 4, 5, 6])
    p = n / n.sum()
    result = aggregate(G, n, "principal")
    measures = update_measures(result.report)
    unit = G / np.linalg.norm(G, axis=1)[:, None]
    np.testing.assert_allclose(measures.pairwise_cosine, unit @ unit.T, atol=1e-12)
    pairs = (unit @ unit.T)[np.triu_indices(6, 1)]
    assert measures.mean_cosine == pytest.approx(pairs.mean())
    assert measures.conflict_rate == (pairs < 0).mean()
    average = p @ G
    assert measures.b_dissimilarity**2 == pytest.approx(p @ (G**2).sum(1) / (average @ average))
    assert measures.cancellation == pytest.approx((average @ average) / (p**2 @ (G**2).sum(1)))


def test_report_from_a_gram_matrix_is_the_aggregation_s_own():
    G, n = updates(), [1, 2, 3, 4, 5, 6]
    own = aggregate(G, n, "principal").report
    rebuilt = gram_report(own.gram, own.weights, own.coefficients["model"], kept=own.kept)
    assert rebuilt.votes_against == own.votes_against
    for name in ("norm_ratio", "cosine", "kept_energy", "eigen_gap", "sign_margin"):
        assert getattr(rebuilt, name) == pytest.approx(getattr(own, name), rel=1e-9), name
    plain = gram_report(own.gram, n)
    assert (plain.norm_ratio, plain.cosine) == pytest.approx((1.0, 1.0))


def test_degenerate_updates():
    zero = update_measures(gram_report(np.zeros((2, 2)), [1, 1]))
    assert (zero.b_dissimilarity, zero.conflict_rate, zero.mean_cosine) == (1.0, 0.0, 0.0)
    opposed = update_measures(gram_report([[1.0, -1.0], [-1.0, 1.0]], [1, 1]))
    assert (opposed.b_dissimilarity, opposed.cancellation) == (np.inf, 0.0)
    assert opposed.conflict_rate == 1.0
    one = update_measures(gram_report([[4.0]], [7]))
    assert (one.mean_cosine, one.conflict_rate, one.b_dissimilarity) == (1.0, 0.0, 1.0)
    with pytest.raises(FedLDError, match="Gram matrix"):
        gram_report([[1.0, 2.0]], [1, 1])
    with pytest.raises(FedLDError, match="Gram matrix"):
        gram_report([[np.inf]], [1])


def conflict_reports(signs, rounds=4, partial=False):
    """Updates of two groups pulling along one common axis in opposite directions, plus noise of their own."""
    rng, m = np.random.default_rng(3), len(signs)
    for t in range(rounds):
        clients = [i for i in range(m) if not partial or (i + t) % 3]
        axis = rng.normal(size=200)
        G = np.array([signs[i] * axis + rng.normal(size=200) for i in clients])
        yield gram_report(G @ G.T, [1] * len(clients), clients=[f"site{i}" for i in clients]).to_json()


@pytest.mark.parametrize("partial", [False, True])
def test_split_finds_the_groups(partial):
    found = split(list(conflict_reports([1, 1, 1, 1, -1, -1], partial=partial)))
    assert found is not None
    assert set(found.minority) == {"site4", "site5"}
    assert set(found.majority) == {"site0", "site1", "site2", "site3"}
    assert found.minority_weight == pytest.approx(1 / 3, abs=0.05)
    assert found.between < -0.3
    assert found.within > 0.2


def test_no_split_of_agreeing_clients():
    found = split(list(conflict_reports([1] * 5)))
    assert found is None or found.between > -0.05
