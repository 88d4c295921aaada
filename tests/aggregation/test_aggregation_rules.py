"""What each rule promises, on cases small enough to work out by hand or to solve another way."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedld.aggregation import RULES, CAGrad, MinNorm, Principal, aggregate, make_rule
from fedld.aggregation.rule import spectrum

ALONE = sorted(set(RULES) - {"measured"})  # which asks clients
RNG = np.random.default_rng(5)
G5 = RNG.normal(size=(5, 20)) + RNG.normal(size=20)
P5 = np.array([0.1, 0.3, 0.2, 0.25, 0.15])


def test_number_of_axes():
    axes = spectrum(G5 @ G5.T)
    assert [Principal(components=x).kept(axes) for x in (0.8, 0.1, 1.0, 1, 3, 99)] == [4, 1, 5, 1, 3, 5]
    shares = np.cumsum(axes.values) / axes.values.sum()
    for energy in (0.3, 0.7, 0.95, 1.0):
        L = Principal(energy=energy).kept(axes)
        assert shares[L - 1] >= energy - 1e-9
        assert L == 1 or shares[L - 2] < energy
    # int(0.8 m) of the released code, which float error must not spoil
    assert [Principal().kept(spectrum(np.diag(np.arange(1.0, m + 1)))) for m in (5, 10, 12, 50)] == [
        4,
        8,
        9,
        40,
    ]


def test_energy_and_report():
    report = aggregate(G5, P5, energy=0.9).report
    assert report.kept_energy >= 0.9
    assert report.kept == len(report.votes_for) == len(report.weight_against)
    assert sum(report.eigenvalues[: report.kept]) / sum(report.eigenvalues) == pytest.approx(
        report.kept_energy
    )


def test_pcgrad_depends_on_its_seed_and_group_only():
    G = np.array([[1.0, 0, 0], [-0.6, 0.5, 0.2], [-0.5, -0.4, 0.7], [0.2, -1.0, -0.4]])
    a, b = (aggregate(G, np.ones(4), "pcgrad", seed=s).update for s in (0, 0))
    assert np.array_equal(a, b)
    assert len({tuple(aggregate(G, np.ones(4), "pcgrad", seed=s).update.round(9)) for s in range(8)}) > 1


def test_fedgh_leaves_no_conflict_in_a_pair():
    G = np.array([[1.0, 0.2], [-0.9, 0.4]])
    u = aggregate(G, [1, 1], "fedgh").update
    assert (G @ u > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["fedgh", "hgd", "pcgrad"])
@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-6, 1e-3])
def test_nearly_opposite_updates_do_not_blow_up(rule, gap, dtype):
    rng = np.random.default_rng(1)
    g = rng.normal(size=200)
    G = np.stack([g, -g, 0.5 * g, -g, g]) + gap * rng.normal(size=(5, 200))
    update = aggregate(torch.from_numpy(G).to(dtype), np.ones(5), rule).update
    assert float(update.norm()) <= 2 * np.linalg.norm(g)


def test_min_norm_solves_its_problem():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        G = rng.normal(size=(6, 4 + seed)) + 0.3 * seed / 20 * rng.normal(size=4 + seed)
        a = MinNorm()(G @ G.T, np.full(6, 1 / 6))
        assert a.sum() == pytest.approx(1)
        assert a.min() >= 0
        v = a @ G
        # Optimality on the simplex: no client gains less than the shortest vector's own square.
        assert (G @ v).min() >= v @ v - 1e-9


def test_cagrad_solves_its_problem():
    """u maximises the worst gain in the ball: compared with a direct search over the ball."""
    G, p, radius = G5[:, :6] * 1.0, P5, 0.4
    g = p @ G
    u = CAGrad(radius)(G @ G.T, p) @ G
    assert np.linalg.norm(u - g) <= radius * np.linalg.norm(g) * (1 + 1e-6)
    ball = {"type": "ineq", "fun": lambda x: (radius * np.linalg.norm(g)) ** 2 - np.sum((x[:6] - g) ** 2)}
    gains = {"type": "ineq", "fun": lambda x: G @ x[:6] - x[6]}
    start = np.append(g, (G @ g).min())
    best = minimize(
        lambda x: -x[6], start, constraints=[ball, gains], method="SLSQP", options={"maxiter": 500}
    )
    assert (G @ u).min() == pytest.approx(-best.fun, rel=1e-4)


def test_clipping():
    G = np.array([[3.0, 0], [0, 1.0], [0, 10.0]])
    assert aggregate(G, [1, 1, 1], "norm-clip", bound=2).update == pytest.approx([2 / 3, 3 / 3])
    assert aggregate(G, [1, 1, 1], "norm-clip").update == pytest.approx([3 / 3, 4 / 3])


def test_robust_rules_resist_one_huge_client():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=30)
    G = truth + 0.1 * rng.normal(size=(9, 30))
    G[4] = -1e3 * truth
    errors = {
        name: np.linalg.norm(aggregate(G, np.ones(9), name).update - truth) / np.linalg.norm(truth)
        for name in (
            "mean",
            "krum",
            "multi-krum",
            "geometric-median",
            "median",
            "trimmed-mean",
            "outlier-pruned",
        )
    }
    assert errors.pop("mean") > 100
    assert max(errors.values()) < 0.2


def test_geometric_median_is_stationary():
    u = aggregate(G5, P5, "geometric-median").update
    directions = (G5 - u) / np.linalg.norm(G5 - u, axis=1, keepdims=True)
    assert np.linalg.norm(P5 @ directions) < 1e-3


def test_cosine_filter():
    G = np.array([[1.0, 0], [1.0, 0.1], [-0.5, 0.1]])
    report = aggregate(G, [1, 1, 1], "cosine-filter").report
    assert report.coefficients["model"] == pytest.approx([0.5, 0.5, 0.0])
    kept = aggregate(G, [1, 1, 1], "cosine-filter", threshold=1.0).report
    assert kept.coefficients["model"] == pytest.approx([1 / 3] * 3)


def test_weighted_coordinate_rules():
    G = np.array([[1.0], [2.0], [10.0]])
    assert aggregate(G, [1, 1, 8], "median", max_weight=1.0).update == pytest.approx([10.0])
    assert aggregate(G, [5, 4, 1], "median", max_weight=1.0).update == pytest.approx([1.5])
    assert aggregate(G, [1, 3, 1], "trimmed-mean", trim=1).update == pytest.approx([2.0])
    H = np.array([[1.0], [2.0], [3.0], [100.0]])
    assert aggregate(H, [1, 1, 2, 1], "outlier-pruned").update == pytest.approx([9 / 4])


def test_layer_is_the_name_up_to_the_last_dot():
    tensors = [("a.0.weight", 8), ("a.0.bias", 4), ("b", 8)]
    report = aggregate(G5, P5, tensors=tensors, granularity="layer").report
    assert sorted(report.coefficients) == ["a.0", "b"]
    layered = aggregate(G5, P5, tensors=tensors, granularity="layer").update
    parts = [aggregate(G5[:, :12].copy(), P5).update, aggregate(G5[:, 12:].copy(), P5).update]
    assert layered == pytest.approx(np.concatenate(parts))


@pytest.mark.parametrize("name", ALONE)
def test_every_rule_works_by_name_for_few_clients(name):
    for m in (1, 2, 3):
        update = aggregate(G5[:m], P5[:m], make_rule(name)).update
        assert np.isfinite(update).all()
