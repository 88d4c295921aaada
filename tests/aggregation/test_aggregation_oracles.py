"""Agreement with the oracle vectors at the tolerances of their README."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedld.aggregation import Krum, MultiKrum, aggregate
from fedld.aggregation.conflict import project
from fedld.aggregation.robust import squared_distances, weiszfeld
from fedld.aggregation.rule import spectrum

ORACLES = Path(__file__).parents[1] / "oracles"


def arrays(name):
    return np.load(ORACLES / f"{name}.npz", allow_pickle=False)


def records(name, wanted=lambda record: True):
    return [
        pytest.param(r, id=r["name"]) for r in json.loads((ORACLES / f"{name}.json").read_text()) if wanted(r)
    ]


def close(found, expected, tolerance):
    scale = np.abs(expected).max()
    assert np.abs(np.asarray(found) - expected).max() <= tolerance * scale


PAPER = {
    "agg_l2": {},
    "agg_l1": {"weighting": "l1"},
    "agg_sum": {"weighting": "sum"},
    "agg_literal": {"weighting": "literal"},
    "agg_l2_drop": {"conflict": "drop"},
    "agg_l2_pgrad": {"conflict": "pgrad"},
    "agg_l2_aftersum": {"conflict": "smooth"},
}


@pytest.mark.parametrize("record", records("fedld_paper_numpy"))
def test_paper_variants(record):
    data, case = arrays("fedld_paper_numpy"), record["name"]
    G = np.ascontiguousarray(data[f"{case}/G"].T)
    for key, options in PAPER.items():
        # Exactly opposite updates have no mean that could orient their axis; the oracle's sign is arbitrary.
        oriented = not (case.startswith("antiparallel") and options.get("conflict") in ("drop", "pgrad"))
        if f"{case}/{key}" in data and oriented:
            result = aggregate(G, data[f"{case}/n"], components=int(data[f"{case}/L"]), **options)
            close(result.update, data[f"{case}/{key}"], 1e-12)
    close(aggregate(G, data[f"{case}/n"], "mean").update, data[f"{case}/fedavg"], 1e-12)
    close(result.report.eigenvalues, data[f"{case}/lambda"], 1e-12)


def test_every_paper_variant_was_compared():
    keys = arrays("fedld_paper_numpy").files
    assert all(sum(key.endswith(f"/{variant}") for key in keys) > 20 for variant in PAPER)


def test_granularity():
    data = arrays("fedld_paper_numpy")
    G = np.ascontiguousarray(data["granularity/G"].T)
    tensors, n = [("a.weight", 40), ("a.bias", 20)], np.ones(len(G))
    whole = aggregate(G, n, tensors=tensors)
    close(whole.update, data["granularity/whole_l2"], 1e-12)
    close(aggregate(G, n, tensors=tensors, granularity="layer").update, data["granularity/whole_l2"], 1e-12)
    per_tensor = aggregate(G, n, tensors=tensors, granularity="tensor")
    close(per_tensor.update, data["granularity/per_block_40_20_l2"], 1e-12)
    close(whole.report.gram, data["granularity/K_block0"] + data["granularity/K_block1"], 1e-12)
    close(per_tensor.report.gram, np.array(whole.report.gram), 1e-12)


def official(record):
    """Cases in which the released code's answer is wanted: not NaN, not k = 0, not some of the rows."""
    odd = ("one_client", "client_num_lt_m", "client_num_gt_m")
    return record.get("history") == "ones" and record["name"] not in odd and record.get("nan_float64") == 0


def released(G, data, record):
    tensors = [(f"t{i:02}", int(n)) for i, n in enumerate(data[f"{record['name']}/lens"])]
    options = {"weighting": "sum", "components": float(record["k_proportion"])}
    return aggregate(G, np.ones(len(G)), granularity="tensor", weights="uniform", tensors=tensors, **options)


@pytest.mark.parametrize("record", records("fedld_official_svd", official))
def test_released_rule(record):
    data, case = arrays("fedld_official_svd"), record["name"]
    G = data[f"{case}/G"]
    close(released(G.astype(np.float64), data, record).update, data[f"{case}/out_float64"], 1e-12)
    # The released float32 code underflows to zeros at this scale; ours agrees with float64 there.
    expected = data[f"{case}/out_float64" if case == "very_tiny_scale" else f"{case}/out_float32"]
    close(released(torch.from_numpy(G), data, record).update.numpy(), expected, 1e-5)


@pytest.mark.parametrize("case", ["zero_client_m5", "zero_client_one_tensor", "all_zero_tensor_hist_nonzero"])
def test_where_the_released_code_gives_nan_we_do_not(case):
    data = arrays("fedld_official_svd")
    result = released(data[f"{case}/G"], data, {"name": case, "k_proportion": 0.8})
    assert np.isnan(data[f"{case}/out_float64"]).any()
    assert np.isfinite(result.update).all()


def hgd(data, case, **options):
    G = data[f"{case}/G"].astype(np.float64)
    tensors = [(f"t{i:02}", int(n)) for i, n in enumerate(data[f"{case}/lens"])]
    reference = torch.from_numpy(data[f"{case}/H"].astype(np.float64))
    kinds = {"granularity": "tensor", "weights": "uniform", "tensors": tensors, "reference": reference}
    return aggregate(G, np.ones(len(G)), "hgd", **kinds, **options)


@pytest.mark.parametrize(
    "record",
    records("hgd_official", lambda r: r["name"] not in ("one_client", "sampling_client_num_50")),
)
def test_hierarchical_rule(record):
    data, case = arrays("hgd_official"), record["name"]
    close(hgd(data, case, released=True).update, data[f"{case}/out_float64"], 1e-8)


def test_symmetric_last_step_does_not_blow_up():
    data = arrays("hgd_official")
    for eps in ("0.1", "0.01", "0.001", "0.0001"):
        case = f"antiparallel_eps{eps}"
        assert hgd(data, case, released=True).report.norm_ratio > 100
        assert hgd(data, case).report.norm_ratio < 2.001


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_pcgrad_and_fedgh(m):
    data = arrays("reference_rules")
    G = data[f"pcgrad_m{m}/G"]
    rows = project(G @ G.T, data[f"pcgrad_m{m}/orders"])
    close(rows, data[f"pcgrad_m{m}/A_rows"], 1e-12)
    close(rows.mean(axis=0) @ G, data[f"pcgrad_m{m}/out_mean"], 1e-12)
    case = f"fedgh_pairwise_own_m{m}"
    close(aggregate(data[f"{case}/G"], data[f"{case}/p"], "fedgh").update, data[f"{case}/out"], 1e-12)


@pytest.mark.parametrize(("m", "f", "k"), [(7, 2, 3), (10, 3, 5), (12, 2, 8)])
def test_robust_rules(m, f, k):
    data, case = arrays("reference_rules"), f"robust_m{m}_f{f}"
    G, ones = data[f"{case}/G"], np.ones(m)
    K = G @ G.T
    ranking = Krum(byzantine=f).ranking(K)
    assert ranking[:1] == data[f"{case}/multikrum_1_indices_true_d2_own"].tolist()
    assert ranking[:k] == data[f"{case}/multikrum_{k}_indices_true_d2_own"].tolist()
    chosen = MultiKrum(byzantine=f, select=k)(K, ones / m)
    assert sorted(np.flatnonzero(chosen)) == sorted(ranking[:k])
    clipped = aggregate(G, ones, "centered-clip", radius=2.0, iterations=3).update
    close(clipped, data[f"{case}/centered_clip_tau2_it3"], 1e-12)
    close(aggregate(G, ones, "trimmed-mean", trim=f).update, data[f"{case}/trimmed_mean_b_f"], 1e-12)
    close(aggregate(G, ones, "median").update, data[f"{case}/coord_median"], 1e-12)
    c = np.zeros(m)
    for _ in range(8):
        c = weiszfeld(ones / m, np.sqrt(squared_distances(K, c)), 0.1)
    close(c @ G, data[f"{case}/rfa_T8_nu0.1"], 1e-12)


def test_geometric_median_of_the_released_code():
    data = arrays("reference_rules")
    G = data["rfa_official/G"]
    smoothing = 1e-5 / np.sqrt(np.mean(np.sum(G**2, axis=1)))
    options = {"iterations": 10, "smoothing": smoothing, "tolerance": 0.0}
    result = aggregate(G, data["rfa_official/alphas"], "geometric-median", **options)
    close(result.update, data["rfa_official/out_maxiter10"], 1e-12)


def test_axes_of_pgrad():
    """PGrad's direction: oriented axes of the centred trajectory, weighted by lambda over its 2-norm."""
    data = arrays("reference_rules")
    trajectory = data["pgrad/trajectory"]
    X, way = trajectory - trajectory.mean(axis=0), trajectory[0] - trajectory[-1]
    axes = spectrum(X @ X.T)
    U = X.T @ axes.vectors[:, :4] / np.sqrt(axes.values[:4])
    direction = U @ (axes.values[:4] / np.linalg.norm(axes.values[:4]) * np.sign(U.T @ way))
    found = data["pgrad/out_grad"]
    close(np.abs(direction) * np.linalg.norm(way), np.abs(found), 1e-10)
