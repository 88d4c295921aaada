"""The same numbers give the same bits, however they lie in memory and however many threads work on them."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.aggregation import (
    RULES,
    Bounds,
    CountSketch,
    MatrixSource,
    Updates,
    aggregate,
    column_specs,
    combine_updates,
    make_rule,
)
from fedld.aggregation.gram import each


def strided(array):
    """Every second row and every third column of a larger array."""
    wide = np.full((2 * array.shape[0], 3 * array.shape[1]), 7, dtype=array.dtype)
    wide[::2, 1::3] = array
    return wide[::2, 1::3]


def sliced(array):
    """Columns of a wider buffer, from an odd place on."""
    wide = np.zeros((array.shape[0], array.shape[1] + 11), dtype=array.dtype)
    wide[:, 5:-6] = array
    return wide[:, 5:-6]


def backwards(array):
    """A view with negative strides."""
    return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]


LAYOUTS = {
    "Fortran": np.asfortranarray,
    "strided": strided,
    "sliced": sliced,
    "backwards": backwards,
    "rows of a Fortran slice": lambda array: np.asfortranarray(sliced(array))[:, :],
}


@pytest.mark.parametrize(
    "rule", ["principal", "mean", "consensus", "median", "trimmed-mean", "outlier-pruned"]
)
@given(
    m=st.integers(1, 17),
    d=st.integers(1, 3000),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    block=st.sampled_from([64, 8192]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_layout_does_not_show(rule, m, d, dtype, layout, block, seed):
    rng = np.random.default_rng(seed)
    G = (rng.normal(size=(m, d)) + rng.normal(size=d)).astype(dtype)
    sizes, other = rng.integers(1, 9, size=m), LAYOUTS[layout](G)
    assert np.array_equal(other, G)
    expected, found = (aggregate(x, sizes, rule, block=block) for x in (G, other))
    assert np.array_equal(found.update, expected.update)
    assert found.report == expected.report


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_mapped_file_does_not_show(tmp_path, dtype, order):
    G = np.random.default_rng(0).normal(size=(6, 1777)).astype(dtype)
    np.save(tmp_path / "g.npy", np.asarray(G, order=order))
    mapped = np.load(tmp_path / "g.npy", mmap_mode="r")
    assert np.array_equal(aggregate(mapped, [1] * 6).update, aggregate(G, [1] * 6).update)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"measured"}))
def test_transposed_tensor_does_not_show(rule):
    G = torch.randn(7, 2003, generator=torch.Generator().manual_seed(4))
    transposed = G.T.contiguous().T
    assert torch.equal(
        aggregate(transposed, range(1, 8), rule).update, aggregate(G, range(1, 8), rule).update
    )


@pytest.fixture(name="threads")
def number_of_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("granularity", "gram"), [("model", "exact"), ("tensor", "exact"), ("model", "sketch")]
)
@pytest.mark.parametrize("rule", ["principal", "hgd", "median"])
def test_threads_do_not_show(threads, monkeypatch, rule, gram, granularity):
    """Several blocks of several pieces in every pass."""
    monkeypatch.setattr("fedld.aggregation.gram.BLOCK", 1 << 17)
    m, d = 8, 20_011
    G = torch.randn(m, d, generator=torch.Generator().manual_seed(1))
    tensors = [("b", 12_000), ("a", 7), ("c", d - 12_007)]
    facts = {"tensors": tensors, "granularity": granularity, "block": 1000}
    facts["gram"] = CountSketch(256) if gram == "sketch" else gram
    found = []
    for count in (1, 2, 5):
        threads(count)
        found.append(aggregate(G, range(1, m + 1), rule, reference=G[0], **facts))
        assert torch.get_num_threads() == count
    assert all(torch.equal(one.update, found[0].update) for one in found)
    assert all(one.report == found[0].report for one in found)


def test_work_is_taken_in_order_and_its_threads_are_single(threads):
    threads(3)
    seen, taken, met = set(), [], threading.Barrier(3, timeout=30)

    def work(task):
        met.wait()  # passes only if three threads work at once
        seen.add((threading.get_ident(), torch.get_num_threads()))
        return task

    taken += each(work, range(6))
    assert taken == list(range(6))
    assert {count for _, count in seen} == {1}
    assert len(seen) == 3
    fresh = []
    other = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert fresh == [3]  # later threads of the program are not left with one


def test_an_error_in_a_thread_reaches_the_caller(threads):
    threads(2)
    with pytest.raises(ZeroDivisionError):
        list(each(lambda task: 1 // task, [1, 0, 1]))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("granularity", ["model", "layer"])
def test_the_engines_way_gives_the_bits_and_the_report_of_aggregate(rule, granularity):
    """Methods combine checked updates; `aggregate` checks what it is given and does the same."""
    torch.manual_seed(0)
    G, sizes, clients = torch.randn(7, 900), [4.0, 1, 3, 2, 5, 2, 9], tuple("abcdefg")
    tensors = (("a.weight", 500), ("a.bias", 20), ("b.weight", 380))
    chosen = make_rule(rule)
    facts = {"granularity": granularity, "tensors": tensors, "clients": clients, "max_weight": 0.3}
    expected = aggregate(G, sizes, chosen, propose=True, **facts)
    updates = Updates(
        source=MatrixSource(G, column_specs(tensors)),
        clients=clients,
        p=np.array(sizes) / sum(sizes),
        granularity=granularity,
    )
    result = combine_updates(updates, chosen, propose=True, bounds=Bounds(0.3))
    assert torch.equal(result.update, expected.update)
    assert result.report == expected.report
