"""Fixed point, Shamir shares, masks, pinned keys and the journal, each by itself."""

import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import isprime

from fedld.errors import FedLDError
from fedld.privacy.context import pinned, read_peers
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.journal import Journal
from fedld.privacy.masks import add_mask, agreed, public_half, seal, unseal
from fedld.privacy.shamir import PRIME, least_shares, recover, split


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("weighted", [True, False])
def test_the_largest_possible_sum_does_not_overflow(bits, weighted):
    sites, weight = 12, 10_000
    segment = Segment("update", 2, 3.0, weighted)
    code = FixedPoint(bits=bits, sites=sites, largest_weight=weight, segments=(segment,))
    largest = np.array([3.0, -3.0])
    total = sum((code.encode(largest, weight) for _ in range(sites)), start=np.zeros(2, code.dtype))
    exact = sites * (weight if weighted else 1) * ((1 << code.value_bits(segment)) - 1)
    assert total.view(f"<i{bits // 8}").tolist() == [exact, -exact]
    assert exact < 2 ** (bits - 1)
    np.testing.assert_allclose(code.decode(total), sites * (weight if weighted else 1) * largest, rtol=1e-12)


@given(
    st.integers(1, 200),
    st.integers(1, 2**20),
    st.sampled_from([32, 64]),
    st.floats(1e-6, 1e6),
)
def test_value_and_weight_bits_and_the_sign_fit_the_ring(sites, weight, bits, bound):
    segment = Segment("x", 1, bound)
    if bits - 1 - (sites * weight).bit_length() < 8:
        with pytest.raises(FedLDError, match="bits leave"):
            FixedPoint(bits=bits, sites=sites, largest_weight=weight, segments=(segment,))
        return
    code = FixedPoint(bits=bits, sites=sites, largest_weight=weight, segments=(segment,))
    assert sites * weight * ((1 << code.value_bits(segment)) - 1) < 2 ** (bits - 1)
    once = int(code.encode(np.array([bound]), 1).view(f"<i{bits // 8}")[0])
    assert once == (1 << code.value_bits(segment)) - 1


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.integers(0, 500), st.sampled_from([32, 64]))
def test_the_error_of_a_value_is_half_a_resolution(values, weight, bits):
    segment = Segment("x", len(values), 1.0)
    code = FixedPoint(bits=bits, sites=4, largest_weight=500, segments=(segment,))
    error = np.abs(code.decode(code.encode(np.array(values), weight)) - weight * np.array(values))
    assert error.max() <= weight * code.resolution(segment) * (0.5 + 1e-9) + 1e-12


@pytest.mark.parametrize("value", [1.0001, -1.0001, np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_coordinate_beyond_the_bound_is_refused_not_clipped(value, dtype):
    code = FixedPoint(bits=32, sites=3, largest_weight=1, segments=(Segment("update", 3, 1.0),))
    with pytest.raises(FedLDError, match="coordinate of 'update'"):
        code.encode(np.array([0, value, 0], dtype), 1)


def test_segments_have_bounds_of_their_own_and_counts_no_weight():
    parts = (Segment("update", 2, 1.0), Segment("size", 1, 1000.0, weighted=False))
    code = FixedPoint(bits=64, sites=3, largest_weight=1000, segments=parts)
    total = code.encode(np.array([0.5, -0.5, 10.0]), 10) + code.encode(np.array([1.0, 0.25, 30.0]), 30)
    np.testing.assert_allclose(code.decode(total), [35, 2.5, 40], rtol=1e-9)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"bits": 16}, "32 or 64"),
        ({"largest_weight": 0}, "largest weight"),
        ({"largest_weight": 2**30}, "bits leave"),
        ({"segments": ()}, "different names"),
    ],
)
def test_impossible_fixed_points_are_refused(values, problem):
    usual = {"bits": 32, "sites": 3, "largest_weight": 1, "segments": (Segment("x", 1, 1.0),)}
    with pytest.raises(FedLDError, match=problem):
        FixedPoint(**{**usual, **values})


@pytest.mark.parametrize(("vector", "weight"), [(np.zeros(3), 1), (np.zeros(2), 2), (np.zeros(2), -1)])
def test_a_vector_or_weight_that_does_not_fit_is_refused(vector, weight):
    code = FixedPoint(bits=32, sites=3, largest_weight=1, segments=(Segment("x", 2, 1.0),))
    with pytest.raises(FedLDError):
        code.encode(vector, weight)


def test_the_field_of_shares_is_a_prime():
    assert isprime(PRIME)


@settings(max_examples=30)
@given(st.binary(min_size=32, max_size=32), st.integers(3, 12), st.randoms())
def test_any_threshold_of_shares_give_the_secret(secret, points, random):
    threshold = least_shares(points)
    shares = dict(enumerate(split(secret, threshold, points), start=1))
    chosen = random.sample(sorted(shares), threshold)
    assert recover({x: shares[x] for x in chosen}, threshold) == secret


def test_the_largest_secret_survives():
    shares = dict(enumerate(split(b"\xff" * 32, 3, 4), start=1))
    assert recover(shares, 3) == b"\xff" * 32


def test_one_share_less_fits_every_secret():
    """For each guess of the secret there is one value of the missing share, so the others say nothing."""
    shares = dict(enumerate(split(b"s" * 32, 3, 3), start=1))
    for guess in (b"s" * 32, b"t" * 32, bytes(32)):
        # the line through guess at 0 and shares 1, 2 gives share 3 of a polynomial of degree 2
        at0, at1, at2 = (int.from_bytes(v, "big") for v in (guess, shares[1], shares[2]))
        third = (at0 - 3 * at1 + 3 * at2) % PRIME
        assert recover({1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")}, 3) == guess
    with pytest.raises(FedLDError, match="too few"):
        recover({1: shares[1], 2: shares[2]}, 3)


def test_shares_are_uniform_and_fresh():
    drawn = [int.from_bytes(split(bytes(32), 3, 3)[0], "big") / PRIME for _ in range(400)]
    assert len(set(drawn)) == 400
    counts = np.histogram(drawn, bins=8, range=(0, 1))[0]
    assert ((counts - 50) ** 2 / 50).sum() < 35  # chi-squared with 7 degrees of freedom, p = 1e-5


def test_foreign_and_malformed_shares_are_refused():
    with pytest.raises(FedLDError, match="malformed"):
        recover({1: b"", 2: b""}, 2)
    with pytest.raises(FedLDError, match="secret of 32 bytes"):
        split(b"short", 2, 3)
    with pytest.raises(FedLDError, match="belong together"):
        recover({1: (2**256 + 5).to_bytes(33, "big")}, 1)


def test_two_owners_of_keys_agree_and_low_order_points_are_refused():
    one, other = b"1" * 32, b"2" * 32
    assert agreed(one, public_half(other)) == agreed(other, public_half(one))
    with pytest.raises(FedLDError, match="low order"):
        agreed(one, "00" * 32)


def test_an_envelope_opens_with_its_key_and_subject_only():
    key = b"k" * 32
    sealed = seal(key, b"share", b"a to b")
    assert unseal(key, sealed, b"a to b") == b"share"
    for wrong in (
        (b"x" * 32, sealed, b"a to b"),
        (key, sealed, b"b to a"),
        (key, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"a to b"),
        (key, b"", b"a to b"),
    ):
        with pytest.raises(FedLDError, match="envelope"):
            unseal(*wrong)


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_a_mask_taken_away_leaves_the_vector_and_chunks_do_not_show(dtype):
    vector = np.arange(700_001).astype(dtype)
    masked = vector.copy()
    add_mask(masked, b"k" * 32)
    assert (masked != vector).mean() > 0.999
    first = vector[:1000].copy()
    add_mask(first, b"k" * 32)
    np.testing.assert_array_equal(first, masked[:1000])
    add_mask(masked, b"k" * 32, subtract=True)
    np.testing.assert_array_equal(masked, vector)


def test_the_mask_is_the_key_stream_of_rfc_8439():
    """Test vector 1 of appendix A.1: key, counter and nonce zero."""
    vector = np.zeros(4, "<u4")
    add_mask(vector, bytes(32))
    assert vector.tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_pinned_keys_are_read_and_nothing_else(tmp_path):
    file = tmp_path / "peers.toml"
    file.write_text(f'[peers]\nberlin = "{"ab" * 32}"\n"st.gallen" = "{"cd" * 32}"\n')
    peers = read_peers(file)
    assert peers == {"berlin": "ab" * 32, "st.gallen": "cd" * 32}
    assert list(pinned(peers, ["st.gallen", "berlin"])) == ["berlin", "st.gallen"]
    with pytest.raises(FedLDError, match="no pinned key"):
        pinned(peers, ["berlin", "rome"])
    with pytest.raises(FedLDError, match="twice"):
        pinned(peers, ["berlin", "berlin"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[peers]",
        "peers = 3",
        '[peers]\na = "xyz"',
        "[peers]\na = 5",
        f'[peers]\n"a b" = "{"ab" * 32}"',
        f'other = 1\n[peers]\na = "{"ab" * 32}"',
        "[peers",
        "\xff\xfe",
    ],
)
def test_unreadable_pins_are_refused(tmp_path, text):
    file = tmp_path / "peers.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(FedLDError):
        read_peers(file)
    with pytest.raises(FedLDError):
        read_peers(tmp_path / "absent.toml")


def test_a_step_is_taken_once_also_by_another_journal_of_the_same_file(tmp_path):
    file = tmp_path / "journal.jsonl"
    first, second = Journal(file), Journal(file)
    first.take("sum", "share", "x")
    with pytest.raises(FedLDError, match="already taken"):
        second.take("sum", "share", "x")
    second.take("sum", "input", "y")
    assert first.detail("sum", "input") == "y"
    assert first.detail("sum", "unmask") is None
    assert file.stat().st_mode & 0o077 == 0


def test_the_torn_end_of_a_crash_is_dropped_and_damage_refused(tmp_path):
    file = tmp_path / "journal.jsonl"
    Journal(file).take("sum", "share", "x")
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"subject": "sum", "st')
    Journal(file).take("sum", "input", "y")
    assert Journal(file).detail("sum", "input") == "y"
    file.write_bytes(b"not json\n" + whole)
    with pytest.raises(FedLDError, match="damaged"):
        Journal(file).take("sum", "unmask", "z")


def test_a_journal_that_shrinks_or_cannot_be_opened_answers_nothing(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.take("sum", "share", "x")
    journal.file.write_bytes(b"")
    with pytest.raises(FedLDError, match="shorter"):
        journal.take("sum", "unmask", "x")
    with pytest.raises(FedLDError, match="cannot be opened"):
        Journal(tmp_path / "none" / "journal.jsonl").take("sum", "share", "x")


def _take(file, results):
    try:
        Journal(file).take("sum", "unmask", "list")
        results.put(1)
    except FedLDError:
        results.put(0)


def test_of_processes_that_take_a_step_at_once_one_succeeds(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=_take, args=(tmp_path / "journal.jsonl", results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(results.get() for _ in workers) == 1
