"""Where a rule stands still: on a convex problem the optimum of Eq. 1 is known."""

import numpy as np
import pytest

from fedld.aggregation import Principal, aggregate
from fedld.aggregation.rule import spectrum


def problem(seed=0, m=6, d=12):
    """Clients with losses (w - a_i)' A_i (w - a_i) / 2; the optimum of Eq. 1 solves one linear system."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 10, size=m)
    p = sizes / sizes.sum()
    roots = rng.normal(size=(m, d, d)) / np.sqrt(d)
    A = roots @ roots.transpose(0, 2, 1) + 0.5 * np.eye(d)
    a = rng.normal(size=(m, d)) + np.where(np.arange(m)[:, None] < m // 2, 2.0, -2.0) * rng.normal(size=d)
    optimum = np.linalg.solve(np.einsum("i,ijk->jk", p, A), np.einsum("i,ijk,ik->j", p, A, a))
    return sizes, lambda w: 0.05 * np.einsum("ijk,ik->ij", A, a - w), optimum


STILL = {
    "mean": {},
    "consensus": {},
    "pgrad": {},
    "principal, project": {"weighting": "literal", "conflict": "project"},
}
MOVES = {
    "keep": {},
    "drop": {"conflict": "drop"},
    "pgrad": {"conflict": "pgrad"},
    "smooth": {"conflict": "smooth"},
}


@pytest.mark.parametrize("rule", STILL)
@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_a_fixed_point(rule, seed):
    sizes, updates, optimum = problem(seed)
    G = updates(optimum)
    step = aggregate(G, sizes, rule.partition(",")[0], **STILL[rule]).update
    assert np.linalg.norm(step) < 1e-7 * np.linalg.norm(G)


@pytest.mark.parametrize("reading", MOVES)
@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_is_no_fixed_point_of_a_reading_with_a_length_per_axis(reading, seed):
    """There the average is zero and the votes are not: the rule walks away from the optimum."""
    sizes, updates, optimum = problem(seed)
    G = updates(optimum)
    step = aggregate(G, sizes, "principal", **MOVES[reading]).update
    assert np.linalg.norm(step) > 1e-3 * np.linalg.norm(G, axis=1).mean()


def test_rounds_of_the_mean_reach_the_optimum_and_rounds_of_principal_do_not():
    sizes, updates, optimum = problem(1)
    ends = {}
    for rule in ("mean", "principal"):
        w = optimum + 1.0
        for _ in range(400):
            w = w + aggregate(updates(w), sizes, rule).update
        ends[rule] = np.linalg.norm(w - optimum)
    assert ends["mean"] < 1e-6
    assert ends["principal"] > 0.1


def test_projection_has_the_averages_length_and_lies_on_the_leading_axes():
    rng = np.random.default_rng(0)
    G, p = rng.normal(size=(6, 30)) + rng.normal(size=30), np.full(6, 1 / 6)
    rule = Principal("literal", "project", components=3)
    u, g = rule(G @ G.T, p) @ G, p @ G
    axes = spectrum(G @ G.T)
    U = (axes.vectors[:, :3] / np.sqrt(axes.values[:3])).T @ G
    assert np.linalg.norm(u) == pytest.approx(np.linalg.norm(g))
    assert u / np.linalg.norm(u) == pytest.approx(U.T @ (U @ g) / np.linalg.norm(U @ g))


@pytest.mark.parametrize("rho", [0.1, 0.3, 0.8])
def test_two_balanced_groups_shrink_as_the_algebra_says(rho):
    """g_i = +-b + s with |s| = rho |b|, in docs/aggregation-theory.md."""
    b, s = np.array([1.0, 0.0]), np.array([0.0, rho])
    G = np.array([b + s, b + s, -b + s, -b + s])
    report = aggregate(G, [1] * 4, "principal", components=1.0).report
    assert report.norm_ratio == pytest.approx(rho * np.sqrt((1 + rho**2) / (1 + rho**4)))


def test_pgrad_follows_its_authors():
    """Centred points with the start, axes turned to the average, its length: against plain numpy."""
    rng = np.random.default_rng(2)
    G, sizes = rng.normal(size=(6, 25)) + rng.normal(size=25), np.arange(1, 7)
    g = sizes / sizes.sum() @ G
    X = np.vstack([np.zeros(25), G])
    _, singular, V = np.linalg.svd(X - X.mean(axis=0))
    values = singular[:4] ** 2
    direction = (values / np.linalg.norm(values) * np.sign(V[:4] @ g)) @ V[:4]
    assert np.linalg.norm(direction) == pytest.approx(1)
    found = aggregate(G, sizes, "pgrad")
    assert found.update == pytest.approx(direction * np.linalg.norm(g))
    assert found.report.norm_ratio == pytest.approx(1)


def test_fedgh_meets_clients_by_name_and_may_average_over_orders():
    rng = np.random.default_rng(3)
    G, names = rng.normal(size=(11, 8)), [f"site{i}" for i in range(11)]
    sizes, order = np.arange(1, 12), rng.permutation(11)
    shuffled = [names[i] for i in order]

    def both(**options):
        a = aggregate(G, sizes, "fedgh", clients=names, **options).update
        b = aggregate(G[order], sizes[order], "fedgh", clients=shuffled, **options).update
        return a, b

    a, b = both()
    assert a == pytest.approx(b)
    assert a == pytest.approx(aggregate(G, sizes, "fedgh").update)  # site10 comes after site9
    assert both(orders=5)[0] == pytest.approx(both(orders=5)[1])
    other = aggregate(G[order], sizes[order], "fedgh", clients=names).update
    assert np.linalg.norm(other - a) > 0.01 * np.linalg.norm(a)  # other names, another order
    assert distance(1) > 2 * distance(200)


def distance(orders):
    """Between two orders of the same clients under exchanged names."""
    rng = np.random.default_rng(4)
    G = rng.normal(size=(7, 8))
    a, b = (aggregate(rows, [1] * 7, "fedgh", orders=orders).update for rows in (G, G[::-1]))
    return np.linalg.norm(a - b)
