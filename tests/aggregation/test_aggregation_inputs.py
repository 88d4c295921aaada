"""Forms of input, what is rejected, and the errors users meet."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedld.aggregation import RULES, GramRule, Principal, aggregate, file_source, make_rule
from fedld.errors import FedLDError

TENSORS = [("a.weight", 30), ("a.bias", 7), ("b.weight", 20)]
SIZES = [1, 2, 3, 4]
ALONE = sorted(set(RULES) - {"measured"})  # which asks clients


@pytest.fixture(name="G")
def updates():
    return torch.randn(4, 57, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def states(G):
    sizes = [size for _, size in TENSORS]
    return [
        {name: part.clone() for (name, _), part in zip(TENSORS, row.split(sizes), strict=True)} for row in G
    ]


def flat(update):
    return torch.cat([update[name].reshape(-1) for name, _ in TENSORS])


def save(folder, G):
    paths = [folder / f"{i}.safetensors" for i in range(len(G))]
    for path, state in zip(paths, states(G), strict=True):
        save_file(state, path)
    return paths


@pytest.mark.parametrize("granularity", ["model", "layer", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["principal", "consensus", "median"])
def test_all_sources_give_the_same_bits(G, tmp_path, dtype, granularity, rule):
    G = G.to(dtype)
    wide = torch.zeros(4, 70, dtype=dtype)
    wide[:, 3:60] = G
    expected = aggregate(G, SIZES, rule, granularity=granularity, tensors=TENSORS)
    assert expected.update.dtype == dtype
    sliced = aggregate(wide[:, 3:60], SIZES, rule, granularity=granularity, tensors=TENSORS)
    from_states = aggregate(states(G), SIZES, rule, granularity=granularity)
    from_files = aggregate(save(tmp_path, G), SIZES, rule, granularity=granularity)
    assert torch.equal(sliced.update, expected.update)
    assert torch.equal(flat(from_states.update), expected.update)
    assert torch.equal(flat(from_files.update), expected.update)
    assert expected.report == sliced.report == from_states.report == from_files.report


@pytest.mark.parametrize("m", [2, 5, 12, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_threads_or_layout(m, dtype):
    d = 20011
    G = torch.randn(m, d, generator=torch.Generator().manual_seed(m)).to(dtype)
    shifted = torch.zeros(m, d + 5, dtype=dtype)
    shifted[:, 3 : d + 3] = G
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = aggregate(G, [1] * m)
        torch.set_num_threads(2)
        two = aggregate(shifted[:, 3 : d + 3], [1] * m)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one.update, two.update)
    assert one.report == two.report


def test_numpy_in_numpy_out_even_read_only_and_transposed(G, tmp_path):
    array = G.numpy()
    expected = aggregate(array, SIZES).update
    assert isinstance(expected, np.ndarray)
    np.save(tmp_path / "g.npy", array)
    mapped = np.load(tmp_path / "g.npy", mmap_mode="r")
    assert np.array_equal(aggregate(mapped, SIZES).update, expected)
    assert np.array_equal(aggregate(np.asfortranarray(array), SIZES).update, expected)
    assert np.array_equal(
        aggregate(array[:, ::-1], SIZES).update, aggregate(array[:, ::-1].copy(), SIZES).update
    )


def test_npy_files(G, tmp_path):
    paths = [tmp_path / f"{i}.npy" for i in range(4)]
    for path, row in zip(paths, G.numpy().reshape(4, 3, 19), strict=True):
        np.save(path, row)
    found = aggregate(paths, SIZES).update["update"]
    assert found.shape == (3, 19)
    assert torch.equal(found.reshape(-1), aggregate(G, SIZES).update)


def test_shapes_come_back(G):
    shaped = [{"w": row[:56].reshape(7, 8), "b": row[56]} for row in G]
    update = aggregate(shaped, SIZES).update
    assert update["w"].shape == (7, 8)
    assert update["b"].shape == ()


def test_gradients_and_inputs_are_left_alone(G):
    leaf = G.clone().requires_grad_()
    assert not aggregate(leaf, SIZES).update.requires_grad
    assert torch.equal(leaf, G)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ALONE)
def test_non_finite_client_is_named_and_touches_nobody(G, bad, dtype, rule):
    spoiled = torch.cat([G[:2], torch.full((1, 57), 1.0, dtype=G.dtype), G[2:]]).to(dtype)
    spoiled[2, 5] = bad
    names = ["anna", "ben", "carl", "dora", "emil"]
    found = aggregate(spoiled, [1, 2, 9, 3, 4], rule, clients=names)
    expected = aggregate(G.to(dtype), SIZES, rule, clients=["anna", "ben", "dora", "emil"])
    assert list(found.report.rejected) == ["carl"]
    assert ("NaN" if np.isnan(bad) else "infinite") in found.report.rejected["carl"]
    tolerance = {torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-8}[dtype]
    difference = (found.update - expected.update).double().norm() / expected.update.double().norm()
    assert float(difference) < tolerance
    assert found.report.weights == expected.report.weights


def test_too_few_finite_clients(G):
    G[1:] = float("nan")
    with pytest.raises(
        FedLDError, match=r"3 clients are needed, but only 1 .* rejected: 1 \(its update holds NaN\)"
    ):
        aggregate(G, SIZES, min_clients=3)
    assert torch.equal(aggregate(G, SIZES).update, G[0])
    G[0] = float("inf")
    with pytest.raises(FedLDError, match="only 0 have finite updates"):
        aggregate(G, SIZES)


@pytest.mark.parametrize("rule", ALONE)
@pytest.mark.parametrize("scale", [1e-18, 1e-30, 1e-36, 1e18, 1e30])
def test_extreme_scales_in_float32(G, rule, scale):
    unit = aggregate(G, SIZES, rule).update
    found = aggregate((G * scale).float(), SIZES, rule).update
    assert found.dtype == torch.float32
    assert torch.allclose(found.double() / scale, unit, rtol=0, atol=2e-5 * float(unit.abs().max()))


def test_one_tiny_client_among_others(G):
    G[1] *= 1e-25
    exact = aggregate(G, SIZES, "norm-clip", bound=1e-24).update
    found = aggregate(G.float(), SIZES, "norm-clip", bound=1e-24).update
    assert torch.allclose(found.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_half_precision_whose_squares_overflow(G):
    large = (G * 2e4).half()  # squared: far above 65504
    exact = aggregate(large.double(), SIZES)
    found = aggregate(large, SIZES)
    assert torch.allclose(found.update.double(), exact.update, rtol=2e-3, atol=10)
    assert found.report.norms == pytest.approx(exact.report.norms, rel=1e-6)


def test_aggregate_that_does_not_fit_its_type():
    G = torch.full((4, 3), 6e4, dtype=torch.float16) * torch.tensor(
        [[1.0], [1], [1], [0.999]], dtype=torch.float16
    )
    G[:, 1] *= torch.tensor([1.0, -0.1, 0.1, -0.1], dtype=torch.float16)
    with pytest.raises(FedLDError, match=r"too large for torch.float16"):
        aggregate(G, SIZES, "cagrad", radius=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 3, 64, 10_000])
def test_block_size_is_rounding_only(dtype, block):
    G = torch.randn(6, 5003, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    G = (G + G.mean(dim=0)).to(dtype)
    default, found = aggregate(G, [1] * 6), aggregate(G, [1] * 6, block=block)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert float((default.update - found.update).norm() / default.update.norm()) < tolerance


ERRORS = {
    "unknown rule 'krumm': did you mean 'krum'": {"rule": "krumm"},
    "unknown option 'weightings' of rule 'principal': did you mean 'weighting'": {"weightings": "l2"},
    "unknown option 'x' of rule 'mean': it has no options": {"rule": "mean", "x": 1},
    "principal: weighting = 'l3' is not valid: valid names: l1, l2, literal, sum": {"weighting": "l3"},
    "principal: components = 0 is not a number of at least 1": {"components": 0},
    "principal: components = 1.5 is not a number above 0 and at most 1": {"components": 1.5},
    "principal: energy = 'much' is not a number above 0": {"energy": "much"},
    "krum: byzantine = 2 needs more clients than 4": {"rule": "krum", "byzantine": 2},
    "krum: byzantine = 1.5 is not a whole number": {"rule": "krum", "byzantine": 1.5},
    "trimmed-mean: trim = 2 leaves nothing of 4 clients": {"rule": "trimmed-mean", "trim": 2},
    "options .'energy'. belong to a rule given by name": {"rule": Principal(), "energy": 0.9},
    "granularity = 'layers' is not valid: did you mean 'layer'": {"granularity": "layers"},
    "block = 0 is not a number of columns": {"block": 0},
    "weights = 'sizes' is not valid: did you mean 'size'": {"weights": "sizes"},
    "3 client names for 4 updates": {"clients": ["a", "b", "c"]},
    "client name 'a' is given twice": {"clients": ["a", "b", "c", "a"]},
    "the tensors add up to 30 parameters, but the updates have 57": {"tensors": [("w", 30)]},
    "tensor name 'w' is given twice": {"tensors": [("w", 30), ("w", 27)]},
    "the reference has 3 parameters, but the updates have 57": {"rule": "hgd", "reference": torch.ones(3)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_thing(G, message):
    with pytest.raises(FedLDError, match=message):
        aggregate(G, SIZES, **ERRORS[message])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2, 3], "3 sizes for 4 updates"),
        ([1, 2, 0, 3], "client '2' has size 0"),
        ([1, -2, 1, 3], "client '1' has size -2"),
        ([1, 2, float("nan"), 3], "client '2' has size nan"),
    ],
)
def test_bad_sizes(G, sizes, message):
    with pytest.raises(FedLDError, match=message):
        aggregate(G, sizes)


def test_bad_updates(G):
    cases = {
        "must be a matrix": G[0],
        "not of shape": G[:, :0],
        "must be floating point numbers": G.long(),
        "floating point numbers, not int64": G.long().numpy(),
        "no updates": [],
        "must be a matrix, a list of state dicts": [1, 2, 3, 4],
    }
    for message, updates in cases.items():
        with pytest.raises(FedLDError, match=message):
            aggregate(updates, SIZES)


def test_bad_state_dicts(G):
    def with_change(change):
        found = states(G)
        change(found[2])
        return found

    cases = {
        "client '2' lacks tensor 'a.bias'": lambda state: state.pop("a.bias"),
        "client '2' has a tensor 'z' that the first client lacks": lambda s: s.update(z=torch.ones(1)),
        r"tensor 'a.bias' has shape \(3,\), not \(7,\)": lambda s: s.update({"a.bias": torch.ones(3)}),
        "tensor 'a.bias' is torch.float32, not torch.float64": lambda s: s.update({"a.bias": torch.ones(7)}),
        "'a.bias' holds torch.int64": lambda s: s.update({"a.bias": torch.ones(7, dtype=torch.int64)}),
    }
    for message, change in cases.items():
        with pytest.raises(FedLDError, match=message):
            aggregate(with_change(change), SIZES)


def test_bad_files(G, tmp_path):
    paths = save(tmp_path, G)
    whole = paths[1].read_bytes()
    length = int.from_bytes(whole[:8], "little")

    def header(change):
        found = json.loads(whole[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    pickled = tmp_path / "0.npy"
    np.save(pickled, np.array([{"evil": 1}]), allow_pickle=True)
    damage = {
        "not a valid safetensors file": b"\x00" * 4,
        "is not a valid safetensors": (2**60).to_bytes(8, "little") + whole[8:],
        "too short for its tensor": whole[:-8],
        "1.safetensors is not a valid": header(lambda h: h["a.bias"].update(shape=[-7])),
        "safetensors is not a valid safetensors file": header(lambda h: h["a.bias"].update(shape=[8])),
        "lacks tensor 'a.bias'": header(lambda h: h.pop("a.bias")),
        "'a.bias' holds I64": header(lambda h: h["a.bias"].update(dtype="I64")),
    }
    for message, content in damage.items():
        paths[1].write_bytes(content)
        with pytest.raises(FedLDError, match=message):
            aggregate(paths, SIZES)
    for message, path in {
        "cannot be read: No such file": tmp_path / "none.npy",
        "neither a .safetensors nor a .npy": tmp_path / "x.pt",
        "holds object": pickled,
    }.items():
        with pytest.raises(FedLDError, match=message):
            file_source([path])


def test_rules_are_values():
    assert make_rule("principal", components=4) == Principal(components=4)
    assert hash(Principal()) == hash(make_rule("principal"))
    assert all(rule.name == name for name, rule in RULES.items())
    assert {name for name, rule in RULES.items() if not issubclass(rule, GramRule)} == {
        "median",
        "trimmed-mean",
        "outlier-pruned",
        "measured",
    }


def test_report_is_json_and_tells_of_conflict():
    G = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1]], dtype=torch.float64)
    report = aggregate(G, [1, 1, 2], clients=["a", "b", "c"]).report
    again = json.loads(json.dumps(report.to_json()))
    assert again["clients"] == ["a", "b", "c"]
    assert report.votes_for[0] == 2
    assert report.votes_against[0] == 1
    assert report.weight_for[0] == pytest.approx(0.5)
    assert report.norm_ratio < 1.0
    assert report.norms == pytest.approx([np.sqrt(1.01)] * 3)
    update = aggregate(G, [1, 1, 2]).update
    cosines = torch.nn.functional.cosine_similarity(G, update[None])
    assert report.cosines == pytest.approx(cosines.tolist())
    average = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64) @ G
    assert report.norm_ratio == pytest.approx(float(update.norm() / average.norm()))


@pytest.mark.parametrize("rule", ["median", "outlier-pruned", "principal"])
def test_report_of_finer_groups_and_other_rules_matches_the_vectors(G, rule):
    result = aggregate(G, SIZES, rule, tensors=TENSORS, granularity="tensor")
    average = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64) @ G
    assert result.report.norm_ratio == pytest.approx(float(result.update.norm() / average.norm()))
    cosine = torch.nn.functional.cosine_similarity(result.update, average, dim=0)
    assert result.report.cosine == pytest.approx(float(cosine))
    assert result.report.gram == pytest.approx((G @ G.T).numpy())


@pytest.mark.parametrize("rule", ALONE)
@pytest.mark.parametrize("granularity", ["model", "tensor"])
def test_without_report_the_update_is_the_same(G, rule, granularity):
    facts = {"tensors": TENSORS, "granularity": granularity}
    bare = aggregate(G, SIZES, rule, report=False, **facts)
    assert torch.equal(bare.update, aggregate(G, SIZES, rule, **facts).update)
    with pytest.raises(FedLDError, match="there is no report"):
        _ = bare.report


def test_mean_without_report_is_one_pass_and_still_leaves_out_what_is_not_finite(G, monkeypatch):
    spoiled = torch.cat([G, torch.full((1, 57), float("nan"), dtype=G.dtype)])
    expected = aggregate(G, SIZES, "mean").update
    found = aggregate(spoiled, [*SIZES, 9], "mean", report=False).update
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr("fedld.aggregation.core.exact_gram", None)  # would be called for a second pass
    assert torch.equal(aggregate(G, SIZES, "mean", report=False).update, expected)
