"""Invariances of the rules and every guarantee of `consensus`, on random updates and on hard ones."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedld.aggregation import RULES, Consensus, GramRule, Principal, aggregate
from fedld.aggregation.rule import spectrum

ALONE = sorted(set(RULES) - {"measured"})  # which asks clients
MANY = settings(max_examples=60, deadline=None)
# The outcome of fedgh and pcgrad depends on the order of clients by definition.
EQUIVARIANT = sorted(set(ALONE) - {"fedgh", "pcgrad"})


NOISE = st.sampled_from([0.0, 1e-3, 0.3, 1.0, 3.0])


@st.composite
def federations(draw, smallest=1, noise=NOISE):
    """Updates of m clients in +-groups: s_i b + common part + noise, with unequal lengths and sizes."""
    m, d = draw(st.integers(smallest, 9)), draw(st.integers(2, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    signs = rng.choice([-1.0, 1.0], size=(m, 1))
    conflict, common = draw(st.sampled_from([0.0, 1.0, 10.0])), draw(st.sampled_from([0.0, 0.1, 1.0]))
    G = conflict * signs * rng.normal(size=d) + common * rng.normal(size=d)
    G = G + draw(noise) * rng.normal(size=(m, d))
    n = rng.integers(1, 20, size=m).astype(float)
    return G * rng.uniform(0.2, 2.0, size=(m, 1)), n / n.sum()


def apply(rule, G, p):
    return rule(G @ G.T, p) @ G


def clear(G, least=1e-4):
    """Simple spectrum and no vote near zero: where the published rule is defined and continuous."""
    axes = spectrum(G @ G.T)
    if axes.rank == 0:
        return False
    values = axes.values / axes.values[0]
    gaps = values[: axes.rank] - np.append(values, 0.0)[1 : axes.rank + 1]
    margins = np.abs(axes.projections(axes.rank)) / np.maximum(axes.norms, 1e-300)[:, None]
    oriented = np.abs(axes.vectors.sum(axis=0))
    return gaps.min() > least and margins.min() > least and oriented.min() > least


def same(a, b, scale, tolerance=1e-6):
    assert np.linalg.norm(a - b) <= tolerance * scale


@pytest.mark.parametrize("name", EQUIVARIANT)
@given(federation=federations(smallest=4, noise=st.sampled_from([0.3, 1.0])), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_client_permutation(name, federation, seed):
    G, p = federation
    assume(clear(G))
    order = np.random.default_rng(seed).permutation(len(p))
    options = {"conflict": "smooth"} if name == "principal" else {}
    a = aggregate(G, p, name, **options).update
    same(a, aggregate(G[order], p[order], name, **options).update, np.linalg.norm(G))


@pytest.mark.parametrize("conflict", ["keep", "drop", "pgrad", "smooth", "project"])
@pytest.mark.parametrize("weighting", ["l2", "l1", "sum", "literal"])
@given(federation=federations(smallest=2, noise=st.sampled_from([0.3, 1.0])), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_invariances_of_principal(weighting, conflict, federation, seed):
    G, p = federation
    assume(clear(G))
    rule, rng = Principal(weighting=weighting, conflict=conflict), np.random.default_rng(seed)
    u, size = apply(rule, G, p), np.linalg.norm(G)
    order = rng.permutation(len(p))
    Q, _ = np.linalg.qr(rng.normal(size=(G.shape[1],) * 2))
    same(apply(rule, G[order], p[order]), u, size)
    same(apply(rule, 7.0 * G, p), 7.0 * u, 7.0 * size)
    same(apply(rule, -G, p), -u, size)
    same(apply(rule, G @ Q.T, p), Q @ u, size)


@pytest.mark.parametrize("name", sorted(name for name, rule in RULES.items() if issubclass(rule, GramRule)))
@given(federation=federations(smallest=3, noise=st.sampled_from([0.3, 1.0])), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_scale_and_rotation_of_all_gram_rules(name, federation, seed):
    G, p = federation
    assume(clear(G))
    rule, rng = RULES[name](), np.random.default_rng(seed)
    u, size = apply(rule, G, p), np.linalg.norm(G)
    Q, _ = np.linalg.qr(rng.normal(size=(G.shape[1],) * 2))
    same(apply(rule, 8.0 * G, p), 8.0 * u, 8.0 * size)
    same(apply(rule, G @ Q.T, p), Q @ u, size, 1e-5)


@pytest.mark.parametrize("name", ALONE)
@given(m=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_identical_clients_and_one_client(name, m, seed):
    rng = np.random.default_rng(seed)
    g, n = rng.normal(size=12), rng.integers(1, 9, size=m)
    options = {"radius": 0.0} if name == "cagrad" else {"iterations": 50} if name == "centered-clip" else {}
    update = aggregate(np.tile(g, (m, 1)), n, name, **options).update
    same(update, g, np.linalg.norm(g), 1e-9)


@pytest.mark.parametrize("name", ALONE)
def test_zero_updates_give_zero(name):
    assert not aggregate(np.zeros((5, 8)), np.ones(5), name).update.any()


@given(federation=federations(smallest=2))
@MANY
def test_l2_keeps_every_length(federation):
    G, p = federation
    assume(clear(G))
    for i in range(len(p)):
        alone = np.eye(len(p))[i]
        assert np.linalg.norm(apply(Principal(components=1.0), G, alone)) == pytest.approx(
            np.linalg.norm(G[i])
        )


@given(federation=federations())
@MANY
def test_smooth_is_continuous_where_keep_is_not(federation):
    """Small changes of the updates change the smooth rule little, whatever the votes do."""
    G, p = federation
    assume(clear(G, 1e-3))
    moved = G + 1e-9 * np.random.default_rng(0).normal(size=G.shape)
    rule = Principal(conflict="smooth", components=1.0)
    same(apply(rule, moved, p), apply(rule, G, p), np.linalg.norm(G), 1e-5)


def moments(G, p):
    g = p @ G
    centred = (G - g) * np.sqrt(p)[:, None]
    return g, centred.T @ centred


def significant(G, p, least=1e-5):
    """The average is more than the rounding of the Gram matrix."""
    return (p @ G) @ (p @ G) > least * (p @ np.sum(G**2, axis=1))


RULE = st.builds(
    Consensus, st.sampled_from([0.01, 0.3, 1.0, 4.0, 100.0]), st.sampled_from([0.05, 0.1, 0.5, 1.0])
)


@given(federation=federations(), rule=RULE)
@MANY
def test_consensus_is_its_definition(federation, rule):
    """Against the d x d matrices that Gram space avoids."""
    G, p = federation
    assume(significant(G, p))
    g, Sigma = moments(G, p)
    v = np.linalg.solve(np.eye(len(g)) + rule.strength * Sigma / (g @ g), g)
    w = rule.floor * g + (1 - rule.floor) * v
    expected = w * np.linalg.norm(g) / np.linalg.norm(w)
    same(apply(rule, G, p), expected, np.linalg.norm(g), 1e-5 + rounding(G, p, rule))


def rounding(G, p, rule):
    """Share of the average that `consensus` leaves to the rounding of K."""
    return 1e-10 * (p @ np.sum(G**2, axis=1)) / (rule.floor**2 * ((p @ G) @ (p @ G)))


@given(federation=federations(), rule=RULE)
@MANY
def test_consensus_has_the_length_of_the_average_and_never_opposes_it(federation, rule):
    G, p = federation
    assume(significant(G, p))
    g = p @ G
    u = apply(rule, G, p)
    slack = 1e-8 + rounding(G, p, rule)
    assert np.linalg.norm(u) == pytest.approx(np.linalg.norm(g), rel=slack)
    assert u @ g / (g @ g) >= 2 * np.sqrt(rule.floor) / (1 + rule.floor) - slack


@given(federation=federations(), rule=RULE)
@MANY
def test_consensus_bounds_hold_even_where_the_average_vanishes(federation, rule):
    G, p = federation
    g, size = p @ G, np.linalg.norm(G)
    u = apply(rule, G, p)
    assert u @ g >= -1e-12 * size**2
    assert rule.floor * np.linalg.norm(g) - 1e-12 * size <= np.linalg.norm(u)
    assert np.linalg.norm(u) <= np.linalg.norm(g) * (1 + 1e-9) + 1e-12 * size


@given(federation=federations(), rule=RULE)
@MANY
def test_consensus_never_spreads_the_gains(federation, rule):
    """Deviation of the clients' first-order gains over their mean, against that of the average."""
    G, p = federation
    assume(significant(G, p))
    g, Sigma = moments(G, p)
    u = apply(rule, G, p)
    assert np.sqrt(u @ Sigma @ u) / (u @ g) <= np.sqrt(g @ Sigma @ g) / (g @ g) * (1 + 1e-5) + 1e-9


@given(federation=federations(), rule=RULE, seed=st.integers(0, 1000))
@MANY
def test_consensus_is_continuous(federation, rule, seed):
    """No step anywhere: also at zero dot products, tied eigenvalues and (almost) identical clients."""
    G, p = federation
    assume(significant(G, p))
    size = np.linalg.norm(G)
    change = np.random.default_rng(seed).normal(size=G.shape)
    change *= 1e-9 * np.linalg.norm(p @ G) / np.linalg.norm(change)
    same(apply(rule, G + change, p), apply(rule, G, p), size, 1e-4)


def test_consensus_is_continuous_down_to_a_vanishing_average():
    b, p = np.array([1.0, 0.0, 0.0]), np.full(4, 0.25)
    for imbalance in 10.0 ** -np.arange(1, 16):
        G = np.stack([b * (1 + imbalance), -b, 0.3 * b, -0.3 * b])
        u, g = apply(Consensus(), G, p), p @ G
        assert u @ g >= 0
        assert 0.1 * np.linalg.norm(g) - 1e-15 <= np.linalg.norm(u) <= np.linalg.norm(g) + 1e-15


@given(federation=federations(), seed=st.integers(0, 1000))
@MANY
def test_consensus_is_equivariant(federation, seed):
    G, p = federation
    assume(significant(G, p))
    rule, rng = Consensus(), np.random.default_rng(seed)
    u, size = apply(rule, G, p), np.linalg.norm(p @ G)
    order = rng.permutation(len(p))
    Q, _ = np.linalg.qr(rng.normal(size=(G.shape[1],) * 2))
    same(apply(rule, G[order], p[order]), u, size, 1e-5)
    same(apply(rule, 8.0 * G, p), 8.0 * u, 8.0 * size, 1e-5)
    same(apply(rule, -G, p), -u, size, 1e-5)
    same(apply(rule, G @ Q.T, p), Q @ u, size, 1e-5)


@given(federation=federations())
@MANY
def test_consensus_of_little_strength_or_full_floor_is_the_average(federation):
    G, p = federation
    assume(significant(G, p))
    g = p @ G
    for rule in (Consensus(0.0), Consensus(1e-12), Consensus(5.0, floor=1.0)):
        same(apply(rule, G, p), g, np.linalg.norm(g), 1e-5)


def test_consensus_at_large_strength_nears_equal_gains():
    rng = np.random.default_rng(0)
    G, p = rng.normal(size=(5, 40)) + 2 * rng.normal(size=40), np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    gains = G @ apply(Consensus(1e5, floor=1e-6), G, p)
    assert gains == pytest.approx([gains.mean()] * 5, rel=1e-3)
    assert gains.min() > 0


def test_opposed_groups_where_the_published_rule_fails():
    """Two groups pull along +-b and agree on a small common direction s."""
    rng = np.random.default_rng(3)
    b, s = np.eye(50)[0], np.eye(50)[1]
    signs = np.array([1, 1, 1, -1, -1.0])
    G = 3 * signs[:, None] * b + 0.5 * s + 0.3 * rng.normal(size=(5, 50))
    sizes = [1, 1, 1, 1.4, 1.4]
    published, consensus = aggregate(G, sizes), aggregate(G, sizes, "consensus")
    p = np.array(sizes) / sum(sizes)
    assert published.report.votes_against[0] == 2
    assert consensus.report.norm_ratio == pytest.approx(1.0)
    assert consensus.report.cosine > 0
    shares = [u @ s / np.linalg.norm(u) for u in (p @ G, published.update, consensus.update)]
    assert shares[2] > shares[0]
    assert shares[2] > shares[1]
