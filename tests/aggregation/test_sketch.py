"""Sketches keep inner products, and the error they report is about the error they make."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.aggregation import CountSketch, aggregate
from fedld.aggregation.inputs import as_sketch
from fedld.errors import FedLDError


@given(
    d=st.integers(1, 700),
    cuts=st.lists(st.integers(0, 700), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_parts_of_a_vector_add_up_to_its_sketch(d, cuts, dtype, seed):
    """A sum over whole numbers is exact, so any parts in any order must give the same sketch."""
    rng, sketch = np.random.default_rng(seed), CountSketch(64, seed)
    vectors = torch.from_numpy(rng.integers(-9, 9, size=(3, d))).to(dtype)
    edges = sorted({0, d, *(cut for cut in cuts if cut < d)})
    found = torch.zeros(3, 64, dtype=dtype)
    parts = list(pairwise(edges))
    for k in rng.permutation(len(parts)):
        start, stop = parts[k]
        sketch.add(found, vectors[:, start:stop].T.contiguous().T, start)
    assert torch.equal(found, sketch(vectors))
    assert torch.equal(sketch(vectors[:1] + vectors[1:2]), sketch(vectors[:1]) + sketch(vectors[1:2]))


def test_every_coordinate_has_one_bucket_and_one_sign():
    found = CountSketch(128, 3)(torch.eye(1000))
    assert torch.equal(found.abs().sum(dim=1), torch.ones(1000))
    counts = found.abs().sum(dim=0)
    assert counts.max() - counts.min() <= 1  # of 128 consecutive coordinates every bucket gets one
    assert abs(float(found.sum())) < 150  # signs of both kinds: 4.7 deviations


def test_inner_products_are_right_on_average_and_spread_as_they_should():
    """Over 200 seeds: the mean within five standard errors, the spread below the bound (1 + cos^2) / k."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(2, 900)))
    x[1] += x[0]
    x /= x.norm(dim=1, keepdim=True)
    exact = float(x[0] @ x[1])
    found = np.array([float(torch.dot(*CountSketch(64, seed)(x))) for seed in range(200)])
    bound = np.sqrt((1 + exact**2) / 64)
    assert abs(found.mean() - exact) < 5 * bound / np.sqrt(200)
    assert 0.7 * bound < found.std() < 1.25 * bound


def updates(m=30, d=60_000, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(m, d))
        + 0.5 * rng.normal(size=d)
        + rng.choice([-1, 1], size=(m, 1)) * rng.normal(size=d)
    )


@pytest.mark.parametrize("rule", ["consensus", "krum", "geometric-median", "min-norm"])
def test_reported_error_is_about_the_error(rule):
    """As an estimate from two halves can be: of K within a factor of 2.5, of the aggregate of ten."""
    G = updates()
    exact = aggregate(G, [1] * 30, rule, gram="exact")
    found = aggregate(G, [1] * 30, rule, gram="sketch")
    assert exact.report.sketch is None
    told = found.report.sketch
    norms = np.array(exact.report.norms)
    errors = (np.array(found.report.gram) - exact.report.gram) / np.outer(norms, norms)
    assert 0.4 < told.gram / np.sqrt(np.mean(errors**2)) < 2.5
    assert 0.4 < told.gram * np.sqrt(told.buckets) < 2.5
    away = np.linalg.norm(found.update - exact.update) / np.linalg.norm(exact.update)
    assert away < 0.1
    assert away <= 10 * told.update + 1e-12


def test_seed_and_buckets_are_the_callers_to_choose():
    G = updates(6, 5000)
    a, b, c = (
        aggregate(G, [1] * 6, "consensus", gram=CountSketch(k, s)) for k, s in [(512, 0), (512, 0), (512, 1)]
    )
    assert np.array_equal(a.update, b.update)
    assert not np.array_equal(a.update, c.update)
    assert (c.report.sketch.buckets, c.report.sketch.seed) == (512, 1)


def test_sketch_rejects_and_names_what_is_not_finite():
    G = updates(5, 9000)
    G[2, 100] = np.nan
    report = aggregate(G, [1] * 5, "mean", gram="sketch").report
    assert list(report.rejected) == ["2"]
    assert "NaN" in report.rejected["2"]


def test_exact_up_to_a_size():
    assert as_sketch("auto", 100, 10**9, "model") is None
    assert as_sketch("auto", 1000, 98_730, "model") is None
    assert as_sketch("auto", 500, 2_000_000, "model") == CountSketch(8192)
    assert as_sketch("auto", 500, 2_000_000, "tensor") is None
    assert as_sketch("sketch", 50, 1_000_000, "model") == CountSketch(16384)
    assert as_sketch("sketch", 50, 60_000, "model") == CountSketch(4096)
    assert as_sketch("sketch", 50, 10, "model") == CountSketch(64)
    with pytest.raises(FedLDError, match="gram = 'sketched' is not valid: did you mean 'sketch'"):
        as_sketch("sketched", 5, 5, "model")
    with pytest.raises(FedLDError, match="is for granularity = 'model', not 'layer'"):
        as_sketch("sketch", 5, 5, "layer")
