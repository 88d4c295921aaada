"""The secure Gram matrix: exact integers, what a server or a site may try, and the check of coefficients."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import isprime

from fedld.aggregation import make_rule
from fedld.aggregation.sketch import CountSketch
from fedld.errors import FedLDError
from fedld.privacy.context import GramContext, digest, public_key
from fedld.privacy.gram import (
    GramServer,
    GramSite,
    OpenedGram,
    check_coefficients,
    combination_digest,
    length_exponent,
    opened_gram,
    sketch_bound,
)
from fedld.privacy.gram_shares import (
    PRIMES,
    open_matrix,
    pairs,
    product_shares,
    rounded,
    share_vector,
    share_zeros,
)
from fedld.privacy.journal import Journal
from fedld.privacy.messages import GramDelivery, GramKeyList, GramOpening, GramShares, from_bytes, to_bytes
from fedld.privacy.simulation import GRAM_STEPS, agreed_coefficients, secure_gram

NAMES = tuple(f"site{k}" for k in range(6))


def sketch(vector, length, seed):
    return CountSketch(length, seed)(torch.from_numpy(vector)[None])[0].numpy()


def identity_sketch(vector, length, seed):
    return vector[:length]


def test_the_moduli_are_primes_and_hold_every_inner_product():
    assert all(isprime(p) for p in PRIMES)
    assert PRIMES[0] * PRIMES[1] > 2 * 2**60


@settings(max_examples=12, deadline=None)
@given(st.integers(5, 12), st.integers(1, 20), st.integers(0, 2**32), st.sampled_from([1.0, 1e-6, 1e6]))
def test_the_opened_matrix_is_that_of_the_integers_exactly(sites, length, seed, bound):
    generator = np.random.default_rng(seed)
    names = [f"site{k:02}" for k in range(sites)]
    vectors = {name: generator.normal(size=8 * length) for name in names}
    for vector in vectors.values():
        vector[:length] *= bound * generator.uniform(0, 1) / np.linalg.norm(vector[:length])
    vectors["site00"][:length] *= bound / np.linalg.norm(vectors["site00"][:length]) * (1 - 1e-12)
    vectors["site01"][:length] = -vectors["site00"][:length]
    opened = secure_gram(vectors, identity_sketch, length=length, bound=bound)
    integers = np.stack([rounded(vectors[name][:length], bound) for name in names]).astype(object)
    np.testing.assert_array_equal(opened.integers.astype(object), integers @ integers.T)
    G = np.stack([vectors[name][:length] for name in names])
    np.testing.assert_allclose(opened.matrix, G @ G.T, atol=bound**2 * 1e-7)


@pytest.mark.parametrize("sites", [5, 8, 12])
def test_as_many_sites_may_stop_as_the_degree_leaves(sites):
    names = [f"site{k:02}" for k in range(sites)]
    vectors = {name: np.random.default_rng(k).normal(size=64) for k, name in enumerate(names)}
    degree = sites // 4
    may_stop = sites - 2 * degree - 1
    whole = secure_gram(vectors, identity_sketch, length=8, bound=10.0)
    stopped = dict.fromkeys(names[1 : 1 + may_stop], "products")
    fewer = secure_gram(vectors, identity_sketch, length=8, bound=10.0, dropouts=stopped)
    np.testing.assert_array_equal(whole.integers, fewer.integers)
    stopped[names[0]] = "products"
    with pytest.raises(FedLDError, match="multiplied their shares"):
        secure_gram(vectors, identity_sketch, length=8, bound=10.0, dropouts=stopped)


@pytest.mark.parametrize("step", GRAM_STEPS[:2])
def test_a_site_that_stops_before_it_shared_ends_the_matrix(step):
    vectors = {name: np.ones(64) for name in NAMES}
    with pytest.raises(FedLDError, match=r"site 'site2' .* begins again without it"):
        secure_gram(vectors, identity_sketch, length=8, bound=10.0, dropouts={"site2": step})


def test_a_count_sketch_of_a_model_gives_lengths_and_angles():
    generator = np.random.default_rng(0)
    common = generator.normal(size=100_000)
    vectors = {name: common + generator.normal(size=100_000) for name in NAMES}
    opened = secure_gram(vectors, sketch, length=4096, bound=1e4)
    G = np.stack([vectors[name] for name in NAMES])
    exact = G @ G.T
    assert np.abs(opened.matrix - exact).max() / exact.max() < 6 / 4096**0.5
    assert opened.sent["site0"] < 5 * (8 * 4096 + 1000) + 3000


def test_fewer_than_five_sites_a_long_sketch_or_vector_are_refused():
    vectors = {name: np.ones(64) for name in NAMES[:4]}
    with pytest.raises(FedLDError, match="at least 5 sites"):
        secure_gram(vectors, identity_sketch, length=8, bound=10.0)
    vectors = {name: np.ones(64) for name in NAMES}
    with pytest.raises(FedLDError, match="an eighth"):
        secure_gram(vectors, identity_sketch, length=9, bound=10.0)
    with pytest.raises(FedLDError, match="beyond its bound"):
        secure_gram(vectors, identity_sketch, length=8, bound=1.0)
    vectors["site1"][0] = np.nan
    with pytest.raises(FedLDError, match="beyond its bound"):
        secure_gram(vectors, identity_sketch, length=8, bound=10.0)


class Sites:
    """Sites with identities and journals on disk."""

    def __init__(self, folder, names=NAMES, **changed):
        self.identities = {name: Ed25519PrivateKey.generate() for name in names}
        self.folder = folder
        usual = {
            "run": "r",
            "round": 3,
            "purpose": "gram",
            "attempt": 0,
            "model": digest("model", "m"),
            "settings": digest("settings", "s"),
            "participants": {name: public_key(key) for name, key in self.identities.items()},
            "length": 8,
            "dimension": 64,
            "bound": 10.0,
        }
        self.usual = {**usual, **changed}
        self.context = GramContext(**self.usual)
        self.server = GramServer(context=self.context)
        self.sites = {}

    def journal(self, name):
        return Journal(self.folder / f"{name}.jsonl")

    def begin(self, contexts=None):
        messages = []
        for name, identity in self.identities.items():
            context = (contexts or {}).get(name, self.context)
            self.sites[name], message = GramSite.begin(context, name, identity, self.journal(name))
            messages.append(message)
        return messages

    def share(self, keys):
        messages = []
        for k, name in enumerate(self.sites):
            ready = self.sites[name].take_keys(keys)
            self.sites[name], message = ready.share(np.arange(8.0) / 10 + k / 10, self.journal(name))
            messages.append(message)
        return messages

    def until_shared(self):
        self.server, keys = self.server.list_keys(self.begin())
        self.server, deliveries = self.server.deliver(self.share(keys))
        return deliveries

    def multiply(self, deliveries):
        messages = []
        for name in deliveries:
            self.sites[name], message = self.sites[name].multiply(
                deliveries[name], self.identities[name], self.journal(name)
            )
            messages.append(message)
        return messages


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path)


def test_every_site_opens_the_same_matrix_itself(sites):
    products = sites.multiply(sites.until_shared())
    sites.server, opened, opening = sites.server.open(products)
    read = from_bytes(GramOpening, to_bytes(opening))
    assert {site.open(read).digest for site in sites.sites.values()} == {opened.digest}


def test_the_server_can_forge_no_matrix(sites):
    products = sites.multiply(sites.until_shared())
    opening = sites.server.open(products)[2]
    first = opening.products[0]
    forged = replace(first, products="00" * (len(first.products) // 2))
    for changed in (
        (forged, *opening.products[1:]),
        (*opening.products, first),
        opening.products[:2],
        (replace(first, site="site1"), *opening.products[2:]),
    ):
        with pytest.raises(FedLDError):
            sites.sites["site3"].open(replace(opening, products=changed))


def test_a_wrong_but_signed_share_is_noticed_where_there_are_more_than_needed(sites):
    products = sites.multiply(sites.until_shared())
    text = "01000000" * (2 * pairs(6))
    signature = sites.context.sign(sites.identities["site0"], "products", "site0", text)
    wrong = replace(products[0], products=text, signature=signature)
    with pytest.raises(FedLDError, match="do not fit each other"):
        opened_gram(sites.context, [wrong, *products[1:]])
    big = "ffffffff" * (2 * pairs(6))
    signature = sites.context.sign(sites.identities["site0"], "products", "site0", big)
    with pytest.raises(FedLDError, match="below their primes"):
        opened_gram(sites.context, [replace(wrong, products=big, signature=signature), *products[1:]])


@pytest.mark.parametrize(
    "changed", [{"model": digest("model", "x")}, {"bound": 9.0}, {"length": 7}, {"round": 4}, {"attempt": 1}]
)
def test_a_site_that_was_told_something_else_does_not_go_on(sites, changed):
    messages = sites.begin(contexts={"site2": GramContext(**{**sites.usual, **changed})})
    with pytest.raises(FedLDError, match="another computation"):
        sites.server.list_keys(messages)
    relabelled = tuple(replace(message, context=sites.context.digest) for message in messages)
    with pytest.raises(FedLDError, match="signature of site 'site2'"):
        sites.sites["site0"].take_keys(GramKeyList(context=sites.context.digest, keys=relabelled))


def test_keys_of_another_identity_or_missing_are_refused(sites):
    messages = sites.begin()
    key = "ab" * 32
    forged = sites.context.sign(Ed25519PrivateKey.generate(), "keys", "site1", key)
    wrong = replace(messages[1], envelope_key=key, signature=forged)
    for keys in ((messages[0], wrong, *messages[2:]), messages[:5], (*messages[:5], messages[0])):
        with pytest.raises(FedLDError):
            sites.sites["site0"].take_keys(GramKeyList(context=sites.context.digest, keys=tuple(keys)))


@pytest.mark.parametrize("attack", ["swapped", "missing", "changed", "more"])
def test_envelopes_for_others_missing_or_changed_are_refused(sites, attack):
    delivery = sites.until_shared()["site0"]
    envelopes = dict(delivery.envelopes)
    if attack == "swapped":
        envelopes["site1"], envelopes["site2"] = envelopes["site2"], envelopes["site1"]
    elif attack == "missing":
        del envelopes["site1"]
    elif attack == "changed":
        envelopes["site1"] = envelopes["site1"][:-1] + bytes([envelopes["site1"][-1] ^ 1])
    else:
        envelopes["rome"] = envelopes["site1"]
    with pytest.raises(FedLDError):
        sites.multiply({"site0": replace(delivery, envelopes=envelopes)})


def test_products_are_given_once_in_a_round(sites):
    deliveries = sites.until_shared()
    before = sites.sites["site0"]
    sites.multiply({"site0": deliveries["site0"]})
    with pytest.raises(FedLDError, match="out of order"):
        sites.multiply({"site0": deliveries["site0"]})
    sites.sites["site0"] = before
    with pytest.raises(FedLDError, match="already taken"):
        sites.multiply({"site0": deliveries["site0"]})
    again = GramContext(**{**sites.usual, "attempt": 1})
    sites.context, sites.server = again, GramServer(context=again)
    deliveries = sites.until_shared()
    with pytest.raises(FedLDError, match="'opening' was already taken"):
        sites.multiply({"site0": deliveries["site0"]})
    sites.multiply({"site1": deliveries["site1"]})  # it has helped to open none


def test_the_seed_of_the_sketch_follows_from_everybodys_keys(tmp_path):
    seeds = set()
    for k in range(3):
        (tmp_path / str(k)).mkdir()
        sites = Sites(tmp_path / str(k))
        keys = sites.server.list_keys(sites.begin())[1]
        seeds.update(site.take_keys(keys).sketch_seed for site in sites.sites.values())
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_binary_messages_of_wrong_size_are_refused(sites):
    message = sites.share(sites.server.list_keys(sites.begin())[1])[0]
    content = to_bytes(message)
    assert from_bytes(GramShares, content) == message
    with pytest.raises(FedLDError, match="one size"):
        from_bytes(GramShares, content[:-1])
    empty = from_bytes(GramDelivery, to_bytes(GramDelivery(context="0" * 64)))
    assert empty.envelopes == {}


# What shares look like.


def test_shares_of_as_many_sites_as_the_degree_are_uniform():
    integers = np.full(5000, 12345)
    shares = share_vector(integers, 2, 5)
    joint = (shares[0, 0] >> np.uint64(27)) * 16 + (shares[3, 0] >> np.uint64(27))
    counts = np.bincount(joint.astype(int), minlength=256)
    expected = 5000 / 256
    assert ((counts - expected) ** 2 / expected).sum() < 371  # chi-squared, 255 degrees, p = 1e-6


def test_opened_products_say_nothing_but_the_constant_term():
    """The opened polynomial of fixed inputs is uniform given its constant term."""
    first = []
    for _ in range(400):
        vectors = np.stack([share_vector(np.array([3, 4]), 1, 5), share_vector(np.array([5, 6]), 1, 5)])
        zeros = np.stack([share_zeros(pairs(2), 2, 5) for _ in range(2)])
        products = {x: product_shares(vectors[:, x - 1], zeros[:, x - 1]) for x in range(1, 6)}
        np.testing.assert_array_equal(open_matrix(products, 2, 1), [[25, 39], [39, 61]])
        first.append(float(products[1][0, 1]) / PRIMES[0])
    counts = np.histogram(first, bins=8, range=(0, 1))[0]
    assert ((counts - 50) ** 2 / 50).sum() < 35


# The site's check of the published coefficients.


def opened(matrix):
    return OpenedGram(np.asarray(matrix).astype(np.int64), np.asarray(matrix, float))


def rule(K, p):
    return make_rule("consensus")(K, p)


def test_coefficients_that_do_not_follow_are_refused():
    generator = np.random.default_rng(0)
    G = generator.normal(size=(6, 40)) + 1
    K, p = G @ G.T, np.full(6, 1 / 6)
    c = rule(K, p)
    check_coefficients(opened(K), p, c, rule)
    for wrong in (np.eye(6)[0], c * 1.001, c[:5], np.full(6, np.nan)):
        with pytest.raises(FedLDError, match="do not follow"):
            check_coefficients(opened(K), p, wrong, rule)


@pytest.mark.parametrize("c", [[1, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0], [0.98, 0.005, 0.005, 0.005, 0.005]])
def test_a_rule_that_picks_single_sites_is_refused(c):
    with pytest.raises(FedLDError, match="fewer than 3 sites"):
        check_coefficients(
            opened(np.eye(5)), np.full(5, 0.2), np.array(c, float), lambda K, p: np.array(c, float)
        )


def test_other_coefficients_relayed_to_one_site_are_refused():
    generator = np.random.default_rng(1)
    vectors = {name: generator.normal(size=64) for name in NAMES}
    gram = secure_gram(vectors, identity_sketch, length=8, bound=100.0)
    p = np.full(len(NAMES), 1 / len(NAMES))
    c = agreed_coefficients(gram, p, lambda K, p: p)
    np.testing.assert_array_equal(c, p)
    other = p.copy()
    other[0] *= 1.01
    with pytest.raises(FedLDError, match="site 'site3' refuses the sum: the published coefficients"):
        agreed_coefficients(gram, p, lambda K, p: p, relayed={"site3": other})


def test_announced_lengths_bound_every_sketch_and_are_refused_where_not_finite():
    vectors = [np.zeros(3), np.full(4, 0.5), np.array([-3.0, 4.0])]
    exponents = [length_exponent(vector) for vector in vectors]
    assert exponents == [-64, 0, 3]
    assert sketch_bound(exponents) == 16.0
    with pytest.raises(FedLDError, match="beyond 2"):
        length_exponent(np.array([np.nan]))


def test_a_sum_is_bound_to_its_matrix_and_coefficients():
    opened = OpenedGram(np.eye(5, dtype=np.int64), np.eye(5))
    c = np.full(5, 0.2)
    found = {combination_digest(opened, c), combination_digest(opened, np.nextafter(c, 1))}
    found.add(combination_digest(OpenedGram(2 * opened.integers, opened.matrix), c))
    assert len(found) == 3
