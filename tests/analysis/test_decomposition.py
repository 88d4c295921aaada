import json
from pathlib import Path

import numpy as np
import pytest

from fedld.analysis import decompose
from fedld.errors import FedLDError

ORACLE = np.load(Path(__file__).parents[1] / "oracles" / "loss_decomposition.npz", allow_pickle=False)
CASES = sorted({key.split("/")[0] for key in ORACLE.files})


def case(name):
    return {key.split("/")[1]: ORACLE[key] for key in ORACLE.files if key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", CASES)
def test_oracle(name):
    oracle = case(name)
    d = decompose(oracle["Lmat_j_i"], oracle["L_j_wbar"], oracle["n"])
    expected = oracle["terms_local_shift_agg"]
    np.testing.assert_allclose([d.local, d.shift, d.aggregation], expected, rtol=1e-12, atol=1e-15)
    assert d.total == pytest.approx(float(oracle["L_wbar"]), rel=1e-12)
    assert d.identity_error <= 1e-12 * d.total
    assert d.absolute["aggregation"] == pytest.approx(abs(expected[2]), rel=1e-12, abs=1e-15)
    assert d.finite
    assert d.diverged == ()


@pytest.mark.parametrize("name", CASES)
def test_contributions_sum_to_the_terms(name):
    oracle = case(name)
    d = decompose(oracle["Lmat_j_i"], oracle["L_j_wbar"], oracle["n"])
    p = oracle["n"] / oracle["n"].sum()
    assert p @ d.shift_by_model == pytest.approx(d.shift, abs=1e-12)
    assert p @ d.aggregation_by_client == pytest.approx(d.aggregation, abs=1e-12)
    assert p @ d.local_by_model == pytest.approx(d.local, abs=1e-12)


def test_sampled_round_by_loops():
    """Weights q over the sampled models and p over all clients, as plain sums."""
    rng = np.random.default_rng(0)
    M, L, n, sampled = rng.uniform(0, 3, (4, 2)), rng.uniform(0, 3, 4), np.array([10, 20, 30, 40]), [3, 1]
    d = decompose(M, L, n, sampled)
    q = {3: 40 / 60, 1: 20 / 60}
    local = sum(q[i] * M[i, column] for column, i in enumerate(sampled))
    mixed = sum(n[j] / 100 * q[i] * M[j, column] for j in range(4) for column, i in enumerate(sampled))
    total = sum(n[j] / 100 * L[j] for j in range(4))
    assert (d.local, d.shift, d.aggregation, d.total) == pytest.approx(
        (local, mixed - local, total - mixed, total), rel=1e-13
    )
    assert d.identity_error < 1e-14
    worst = max(sampled, key=lambda i: n / 100 @ M[:, sampled.index(i)] - M[i, sampled.index(i)])
    assert d.worst_shift == worst


def test_blame():
    M = [[0.1, 0.2, 2.0], [0.1, 0.1, 2.0], [0.2, 0.2, 0.1]]
    d = decompose(M, [0.1, 0.1, 3.0], [1, 1, 1])
    assert (d.worst_shift, d.most_hurt) == (2, 2)


def test_one_client_loses_nothing_to_others():
    d = decompose([[0.7]], [0.7], [12])
    assert (d.local, d.shift, d.aggregation, d.total) == (0.7, 0.0, 0.0, 0.7)


def test_client_without_data_has_no_weight():
    whole = decompose([[0.2, 1.0], [0.8, 0.4]], [0.5, 0.6], [10, 30])
    M = [[0.2, 1.0, 9.0], [0.8, 0.4, 9.0], [np.nan, np.nan, np.nan]]
    empty = decompose(M, [0.5, 0.6, np.nan], [10, 30, 0])
    assert empty.finite
    assert (empty.local, empty.shift, empty.aggregation) == (whole.local, whole.shift, whole.aggregation)
    assert np.isnan(empty.aggregation_by_client[2])
    assert empty.most_hurt == whole.most_hurt


def test_diverged_model_is_named_and_the_terms_say_so():
    d = decompose([[0.2, np.inf], [0.8, 0.4]], [0.5, 0.6], [1, 1])
    assert d.diverged == (1,)
    assert (d.local, d.shift, d.aggregation, d.total) == (pytest.approx(0.3), np.inf, -np.inf, 0.55)
    assert not d.finite
    assert np.isnan(d.identity_error)
    d = decompose([[0.2, np.inf], [0.8, np.inf]], [np.nan, 0.6], [1, 1])
    assert d.local == np.inf
    assert np.isnan(d.shift)
    assert np.isnan(d.total)
    assert json.loads(json.dumps(d.to_json(), allow_nan=False))["local"] is None


def test_standard_errors_bound_the_spread_of_estimates():
    """Losses estimated on samples: the stated error covers the spread over many draws, and not absurdly."""
    rng = np.random.default_rng(1)
    draws, k, p, q = 4000, 25, np.array([0.25, 0.75]), np.array([0.25, 0.75])
    true = np.array([[0.5, 1.0], [1.5, 0.7]])
    noise = rng.normal(size=(draws, 2, k, 1)) + 0.5 * rng.normal(size=(draws, 2, k, 3))  # shared by a row
    estimates = noise.mean(2) + np.column_stack([true, [0.6, 0.8]])
    se = np.full((2, 3), (1.25 / k) ** 0.5)
    d = decompose(
        estimates[0, :, :2], estimates[0, :, 2], [25, 75], cross_error=se[:, :2], global_error=se[:, 2]
    )
    mixed = np.einsum("j,sji,i->s", p, estimates[..., :2], q)
    spread = {
        "local": np.einsum("i,sii->s", q, estimates[..., :2]).std(),
        "aggregation": (estimates[..., 2] @ p - mixed).std(),
        "total": (estimates[..., 2] @ p).std(),
    }
    assert d.standard_error is not None
    assert d.standard_error["local"] == pytest.approx(spread["local"], rel=0.05)
    assert d.standard_error["total"] == pytest.approx(spread["total"], rel=0.05)
    assert spread["aggregation"] < d.standard_error["aggregation"] < 6 * spread["aggregation"]
    assert decompose(estimates[0, :, :2], estimates[0, :, 2], [25, 75]).standard_error is None


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([0.1, 0.2], [0.1], [1]), "matrix"),
        (([[0.1, 0.2]], [0.1, 0.2], [1, 1]), "1 clients"),
        (([[0.1, 0.2], [0.1, 0.2]], [0.1, 0.2], [1, 1, 1]), "sizes"),
        (([[0.1], [0.1]], [0.1, 0.2], [1, 1]), "1 columns for 2"),
        (([[0.1], [0.1]], [0.1, 0.2], [1, 1], [2]), "distinct"),
        (([[0.1, 0.1], [0.1, 0.1]], [0.1, 0.2], [1, 1], [1, 1]), "distinct"),
        (([[0.1], [0.1]], [0.1, 0.2], [1, 0], [1]), "positive"),
        (([[0.1]], [0.1], [-1]), "at least 0"),
    ],
)
def test_wrong_shapes_and_sizes(arguments, word):
    with pytest.raises(FedLDError, match=word):
        decompose(*arguments)


def test_wrong_shape_of_errors():
    with pytest.raises(FedLDError, match="standard errors"):
        decompose([[0.1]], [0.1], [1], cross_error=[0.1])
