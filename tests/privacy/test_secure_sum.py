"""The secure sum: what it opens, and what a malicious server or a lost site can do to it."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedld.errors import FedLDError
from fedld.privacy.context import SumContext, digest, public_key
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.journal import Journal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    ShareKeys,
    SurvivorList,
    SurvivorProof,
    Unmask,
    from_bytes,
    to_bytes,
)
from fedld.privacy.simulation import STEPS, secure_sum
from fedld.privacy.sum_server import SumServer
from fedld.privacy.sum_site import SumSite

NAMES = ("athens", "berlin", "cairo", "delhi", "essen")


def coding(sites=5, length=6, bits=32, weight=100):
    return FixedPoint(
        bits=bits, sites=sites, largest_weight=weight, segments=(Segment("update", length, 1.0),)
    )


class Sites:
    """Sites with identities and journals on disk, in a sum with a server that a test may make lie."""

    def __init__(self, folder, names=NAMES, **context):
        self.identities = {name: Ed25519PrivateKey.generate() for name in names}
        self.folder = folder
        self.context = self.make_context(**context)
        self.server = SumServer(context=self.context)
        self.sites = {}
        generator = np.random.default_rng(0)
        self.vectors = {name: generator.uniform(-1, 1, self.context.code.length) for name in names}

    def make_context(self, **changed):
        keys = {name: public_key(identity) for name, identity in self.identities.items()}
        usual = {
            "run": "r",
            "round": 3,
            "purpose": "update",
            "attempt": 0,
            "model": digest("model", "m"),
            "settings": digest("settings", "s"),
            "participants": keys,
            "code": coding(len(keys)),
        }
        return SumContext(**{**usual, **changed})

    def journal(self, name):
        """The journal as a site that has just started reads it."""
        return Journal(self.folder / f"{name}.jsonl")

    def begin(self, names=None, contexts=None):
        messages = []
        for name in names or self.identities:
            context = (contexts or {}).get(name, self.context)
            self.sites[name], message = SumSite.begin(
                context, name, self.identities[name], self.journal(name)
            )
            messages.append(message)
        return messages

    def share(self, keys, names=None):
        messages = []
        for name in names or self.sites:
            self.sites[name], message = self.sites[name].share_keys(keys, self.journal(name))
            messages.append(message)
        return messages

    def coded(self, name, weight=10):
        return self.context.code.encode(self.vectors[name], weight)

    def mask(self, deliveries, names=None):
        messages = []
        for name in names or deliveries:
            self.sites[name], message = self.sites[name].mask(
                deliveries[name], self.coded(name), self.journal(name)
            )
            messages.append(message)
        return messages

    def check(self, survivors, names=None):
        messages = []
        for name in names or survivors.survivors:
            self.sites[name], message = self.sites[name].check(
                survivors, self.identities[name], self.journal(name)
            )
            messages.append(message)
        return messages

    def until_shared(self):
        self.server, keys = self.server.list_keys(self.begin())
        self.server, deliveries = self.server.deliver(self.share(keys))
        return deliveries

    def until_masked(self, without=()):
        deliveries = self.until_shared()
        inputs = self.mask(deliveries, [name for name in deliveries if name not in without])
        self.server, survivors = self.server.collect(inputs)
        return survivors

    def until_checked(self, without=()):
        checks = self.check(self.until_masked(without))
        self.server, proof = self.server.confirm(checks)
        return proof

    def unmask(self, proof):
        return [self.sites[name].unmask(proof, self.journal(name))[1] for name in proof.signatures]


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path)


def test_the_opened_sum_is_the_integer_sum_bit_for_bit(sites):
    proof = sites.until_checked()
    opened = sites.server.open(sites.unmask(proof))[1]
    expected = sum((sites.coded(name) for name in NAMES), start=np.zeros(6, "<u4"))
    np.testing.assert_array_equal(opened.total, expected)
    assert opened.survivors == NAMES


@settings(max_examples=12, deadline=None)
@given(
    st.integers(3, 7),
    st.sampled_from([32, 64]),
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([None, *STEPS]),
)
def test_sums_with_any_sites_bits_lengths_and_one_dropout(sites, bits, seed, length, step):
    names = [f"site{k}" for k in range(sites)]
    generator = np.random.default_rng(seed)
    vectors = {name: generator.uniform(-1, 1, length) for name in names}
    weights = {name: int(generator.integers(0, 100)) for name in names}
    code = coding(sites, length, bits)
    dropouts = {names[seed % sites]: step} if step and sites >= 4 else {}
    opened = secure_sum(vectors, weights, code, dropouts=dropouts)
    lost = [name for name in dropouts if step in ("keys", "shares", "input")]
    assert opened.survivors == tuple(name for name in names if name not in lost)
    exact = sum((code.encode(vectors[n], weights[n]) for n in opened.survivors), np.zeros(length, code.dtype))
    np.testing.assert_array_equal(opened.integers, exact)
    real = sum(weights[n] * vectors[n] for n in opened.survivors)
    error = sum(weights.values()) * code.resolution(code.segments[0]) / 2
    np.testing.assert_allclose(opened.total, real, atol=error * (1 + 1e-6) + 1e-9)


@pytest.mark.parametrize(("first", "second"), list(product(STEPS, STEPS)))
def test_two_of_seven_sites_may_stop_at_any_messages(first, second):
    names = [f"site{k}" for k in range(7)]
    vectors = {name: np.full(4, 0.5) for name in names}
    opened = secure_sum(
        vectors, dict.fromkeys(names, 2), coding(7, 4), dropouts={"site1": first, "site4": second}
    )
    np.testing.assert_allclose(opened.total, len(opened.survivors), atol=1e-3)


@pytest.mark.parametrize("step", STEPS)
def test_fewer_sites_than_the_threshold_open_nothing(step):
    vectors = {name: np.zeros(4) for name in NAMES}
    with pytest.raises(FedLDError, match="only 3 of 5 sites"):
        secure_sum(vectors, dict.fromkeys(NAMES, 1), coding(5, 4), dropouts={"cairo": step, "delhi": step})


def test_two_sites_make_no_secure_sum():
    with pytest.raises(FedLDError, match="at least 3 sites"):
        secure_sum({"a": np.zeros(4), "b": np.zeros(4)}, {"a": 1, "b": 1}, coding(2, 4))


def test_a_vector_beyond_its_bound_is_refused_before_anything_is_sent():
    vectors = {name: np.zeros(4) for name in NAMES}
    vectors["cairo"][2] = 1.01
    with pytest.raises(FedLDError, match="beyond its bound"):
        secure_sum(vectors, dict.fromkeys(NAMES, 1), coding(5, 4))


def test_every_message_travels_as_bytes(sites):
    proof = sites.until_checked(without=["cairo"])
    message = sites.unmask(proof)[0]
    assert from_bytes(Unmask, to_bytes(message)) == message
    assert from_bytes(SurvivorProof, to_bytes(proof)) == proof
    assert set(message.key_shares) == {"cairo"}
    assert set(message.seed_shares) == set(NAMES) - {"cairo"}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (SurvivorList, b""),
        (SurvivorList, b"{}\n"),
        (SurvivorList, b'{"context": "00", "survivors": []}\n'),
        (SurvivorList, json.dumps({"context": "0" * 64, "survivors": ["a b"]}).encode() + b"\n"),
        (SurvivorList, json.dumps({"context": "0" * 64, "survivors": ["a"] * 201}).encode() + b"\n"),
        (SurvivorList, json.dumps({"context": "0" * 64, "survivors": [], "more": 1}).encode() + b"\n"),
        (SurvivorList, json.dumps({"context": "0" * 64, "survivors": []}).encode() + b"\nrest"),
        (MaskedInput, json.dumps({"context": "0" * 64, "site": "a"}).encode() + b"\nabc"),
        (
            ShareKeys,
            json.dumps({"context": "0" * 64, "site": "a", "envelopes": {"b": "00"}}).encode() + b"\n",
        ),
        (AdvertiseKeys, b"\xff\xfe\n"),
        (Unmask, b"[" * 100_000 + b"\n"),
    ],
)
def test_malformed_messages_are_one_sentence(sites, kind, content):
    with pytest.raises(FedLDError):
        from_bytes(kind, content, sites.context)


# What a malicious server may try.


def test_keys_signed_by_another_identity_are_refused(sites):
    """A wrong key: the server advertises its own keys in the name of a site."""
    messages = sites.begin()
    forger = Ed25519PrivateKey.generate()
    keys = (messages[1].envelope_key, messages[1].mask_key, messages[1].commitment)
    forged = replace(messages[1], signature=sites.context.sign(forger, "keys", "berlin", *keys))
    answer = KeyList(context=sites.context.digest, keys=(messages[0], forged, *messages[2:]))
    with pytest.raises(FedLDError, match="signature of site 'berlin'"):
        sites.share(answer)


@pytest.mark.parametrize("field", ["envelope_key", "mask_key", "commitment", "site"])
def test_no_signed_field_of_advertised_keys_can_be_changed(sites, field):
    messages = sites.begin()
    other = "athens" if field == "site" else "ab" * 32
    keys = (*messages[:4], replace(messages[4], **{field: other}))
    with pytest.raises(FedLDError):
        sites.share(KeyList(context=sites.context.digest, keys=keys))


@pytest.mark.parametrize(
    "changed",
    [
        {"model": digest("model", "another")},
        {"settings": digest("settings", "another")},
        {"round": 4},
        {"run": "another"},
        {"attempt": 1},
        {"purpose": "losses"},
        {"code": coding(5, 6, 64)},
    ],
)
def test_a_site_that_was_told_something_else_does_not_go_on(sites, changed):
    """Another model, settings, round... relayed to one site: its signature is of another context."""
    messages = sites.begin(contexts={"delhi": sites.make_context(**changed)})
    with pytest.raises(FedLDError, match="belongs to another computation"):
        sites.server.list_keys(messages)
    relabelled = [replace(message, context=sites.context.digest) for message in messages]
    answer = KeyList(context=sites.context.digest, keys=tuple(relabelled))
    with pytest.raises(FedLDError, match="signature of site 'delhi'"):
        sites.sites["athens"].share_keys(answer, sites.journal("athens"))
    with pytest.raises(FedLDError, match="belongs to another computation"):
        sites.sites["delhi"].share_keys(answer, sites.journal("delhi"))


def test_a_site_with_another_list_of_participants_does_not_go_on(sites):
    keys = dict(sites.context.participants)
    keys["rome"] = keys.pop("essen")
    messages = sites.begin(contexts={"berlin": sites.make_context(participants=keys)})
    with pytest.raises(FedLDError, match="belongs to another computation"):
        sites.server.list_keys(messages)


def test_a_site_takes_part_under_its_own_key_only(sites):
    with pytest.raises(FedLDError, match="with its own key"):
        SumSite.begin(sites.context, "berlin", sites.identities["cairo"], sites.journal("berlin"))
    with pytest.raises(FedLDError, match="with its own key"):
        SumSite.begin(sites.context, "rome", sites.identities["cairo"], sites.journal("rome"))


def test_a_key_list_with_a_site_twice_or_without_this_site_is_refused(sites):
    messages = sites.begin()
    twice = KeyList(context=sites.context.digest, keys=(*messages, messages[0]))
    with pytest.raises(FedLDError, match="twice"):
        sites.sites["athens"].share_keys(twice, sites.journal("athens"))
    without = KeyList(context=sites.context.digest, keys=tuple(messages[1:]))
    with pytest.raises(FedLDError, match="own keys"):
        sites.sites["athens"].share_keys(without, sites.journal("athens"))


def test_a_participant_cannot_advertise_a_peers_keys_as_its_own(sites):
    messages = sites.begin()
    keys = (messages[0].envelope_key, messages[0].mask_key, messages[0].commitment)
    copied = replace(
        messages[0],
        site="berlin",
        signature=sites.context.sign(sites.identities["berlin"], "keys", "berlin", *keys),
    )
    with pytest.raises(FedLDError, match="the same"):
        sites.server.list_keys([messages[0], copied, *messages[2:]])


@pytest.mark.parametrize("attack", ["swapped", "changed", "own", "unknown", "few"])
def test_envelopes_for_others_or_changed_are_refused(sites, attack):
    deliveries = sites.until_shared()
    envelopes = dict(deliveries["athens"].envelopes)
    if attack == "swapped":
        envelopes["berlin"], envelopes["cairo"] = envelopes["cairo"], envelopes["berlin"]
    elif attack == "changed":
        first = envelopes["berlin"]
        envelopes["berlin"] = ("0" if first[0] != "0" else "1") + first[1:]
    elif attack == "own":
        envelopes["athens"] = envelopes["berlin"]
    elif attack == "unknown":
        envelopes["rome"] = envelopes["berlin"]
    else:
        envelopes = {"berlin": envelopes["berlin"], "cairo": envelopes["cairo"]}
    with pytest.raises(FedLDError):
        sites.sites["athens"].mask(
            replace(deliveries["athens"], envelopes=envelopes), sites.coded("athens"), sites.journal("athens")
        )


@pytest.mark.parametrize(
    "survivors",
    [
        ("athens", "berlin", "cairo", "cairo", "delhi"),
        ("berlin", "athens", "cairo", "delhi"),
        ("athens", "berlin", "cairo"),
        ("berlin", "cairo", "delhi", "essen"),
        ("athens", "berlin", "cairo", "rome"),
    ],
)
def test_a_list_of_survivors_with_repeats_too_few_or_others_is_not_signed(sites, survivors):
    answer = sites.until_masked()
    with pytest.raises(FedLDError, match=r"survivors|sent a vector"):
        sites.check(replace(answer, survivors=survivors), ["athens"])


def test_two_lists_of_survivors_are_noticed_before_any_share_is_given(sites):
    """The server tells athens that essen survived, and the others that it did not."""
    everybody = sites.until_masked()
    fewer = replace(everybody, survivors=NAMES[:4])
    signatures = {"athens": sites.check(everybody, ["athens"])[0].signature}
    for name in NAMES[1:4]:
        signatures[name] = sites.check(fewer, [name])[0].signature
    proof = SurvivorProof(context=sites.context.digest, signatures=signatures)
    for name in NAMES[:4]:
        with pytest.raises(FedLDError, match="signature"):
            sites.sites[name].unmask(proof, sites.journal(name))
    honest = {name: signature for name, signature in signatures.items() if name != "athens"}
    with pytest.raises(FedLDError, match="only 3 of 5 sites signed"):
        sites.sites["berlin"].unmask(replace(proof, signatures=honest), sites.journal("berlin"))


def test_a_site_signs_one_list_also_when_its_memory_is_turned_back(sites):
    answer = sites.until_masked()
    before = sites.sites["athens"]
    sites.check(answer, ["athens"])
    sites.sites["athens"] = before
    with pytest.raises(FedLDError, match="already taken"):
        sites.check(replace(answer, survivors=NAMES[:4]), ["athens"])


def test_both_kinds_of_share_never_leave_in_one_message(sites):
    for message in sites.unmask(sites.until_checked(without=["cairo"])):
        assert not set(message.seed_shares) & set(message.key_shares)


def test_both_kinds_of_share_never_leave_in_two_messages_or_after_a_restart(sites):
    proof = sites.until_checked(without=["cairo"])
    before = sites.sites["athens"]
    after, _ = before.unmask(proof, sites.journal("athens"))
    with pytest.raises(FedLDError, match="out of order"):
        after.unmask(proof, sites.journal("athens"))
    # The process is killed and starts again with its memory of before the answer: the journal knows.
    with pytest.raises(FedLDError, match="already taken"):
        before.unmask(proof, sites.journal("athens"))
    turned = replace(before, survivors=NAMES)
    with pytest.raises(FedLDError):
        turned.unmask(proof, sites.journal("athens"))
    assert not after.shares


def test_signatures_of_all_for_another_list_do_not_help_a_restarted_site(sites):
    """Peers sign a second list: a site whose journal has the first one gives nothing for it."""
    answer = sites.until_masked()
    sites.check(answer, ["athens"])
    second = NAMES[:4]
    signatures = {
        name: sites.context.sign(sites.identities[name], "survivors", *second) for name in NAMES[:4]
    }
    proof = SurvivorProof(context=sites.context.digest, signatures=signatures)
    with pytest.raises(FedLDError, match="signature"):
        sites.sites["athens"].unmask(proof, sites.journal("athens"))
    turned = replace(sites.sites["athens"], survivors=second)
    with pytest.raises(FedLDError, match="journal does not have"):
        turned.unmask(proof, sites.journal("athens"))


def test_a_site_that_lost_its_journal_gives_no_shares(sites):
    proof = sites.until_checked()
    (sites.folder / "athens.jsonl").unlink()
    with pytest.raises(FedLDError, match="journal does not have"):
        sites.sites["athens"].unmask(proof, sites.journal("athens"))


def test_a_replayed_round_is_refused(sites):
    sites.until_checked()
    with pytest.raises(FedLDError, match="already taken"):
        sites.begin(["athens"])


def test_a_failed_attempt_may_be_repeated_and_an_opened_one_may_not(sites):
    """The same vectors summed over other survivors would differ by a single vector."""
    sites.until_checked()
    for attempt in (1, 2):
        sites.context = sites.make_context(attempt=attempt)
        sites.server = SumServer(context=sites.context)
        proof = sites.until_checked(without=["essen"])
        if attempt == 1:
            assert sites.server.open(sites.unmask(proof))[1].survivors == NAMES[:4]
        else:
            with pytest.raises(FedLDError, match="'opening' was already taken"):
                sites.unmask(proof)


def test_messages_of_an_earlier_round_do_not_count(sites, tmp_path):
    early = sites.begin()
    sites.context = sites.make_context(round=4)
    late = SumServer(context=sites.context)
    with pytest.raises(FedLDError, match="another computation"):
        late.list_keys(early)


def test_answers_out_of_order_are_refused(sites):
    proof = sites.until_checked()
    with pytest.raises(FedLDError, match="out of order"):
        sites.check(SurvivorList(context=sites.context.digest, survivors=NAMES), ["athens"])
    fresh = Sites(sites.folder / "..", names=NAMES)
    with pytest.raises(FedLDError, match="out of order"):
        SumSite(context=fresh.context, site="athens", envelope_secret=b"", mask_secret=b"", seed=b"").unmask(
            proof, sites.journal("athens")
        )


# What a faulty or late site may do to the server.


def test_a_late_vector_after_unmasking_does_not_count(sites):
    deliveries = sites.until_shared()
    inputs = sites.mask(deliveries, NAMES[:4])
    sites.server, survivors = sites.server.collect(inputs)
    sites.server, proof = sites.server.confirm(sites.check(survivors))
    sites.server, opened = sites.server.open(sites.unmask(proof))
    late = sites.mask(deliveries, ["essen"])
    with pytest.raises(FedLDError, match="already at 'open'"):
        sites.server.collect([*inputs, *late])
    assert opened.survivors == NAMES[:4]


@pytest.mark.parametrize("fault", ["twice", "unknown", "short", "type", "few"])
def test_vectors_twice_from_others_or_of_another_form_are_refused(sites, fault):
    inputs = sites.mask(sites.until_shared())
    if fault == "twice":
        inputs.append(inputs[0])
    elif fault == "unknown":
        inputs.append(replace(inputs[0], site="rome"))
    elif fault == "short":
        inputs[0] = replace(inputs[0], vector=inputs[0].vector[:-1])
    elif fault == "type":
        inputs[0] = replace(inputs[0], vector=inputs[0].vector.astype("<u8"))
    else:
        inputs = inputs[:3]
    with pytest.raises(FedLDError):
        sites.server.collect(inputs)


def test_a_wrong_share_is_named_and_opens_nothing(sites):
    messages = sites.unmask(sites.until_checked(without=["cairo"]))
    for kind, what in (("seed_shares", "self seed"), ("key_shares", "mask key")):
        shares = dict(getattr(messages[0], kind))
        peer = sorted(shares)[0]
        shares[peer] = "00" * 33
        with pytest.raises(FedLDError, match=rf"{what} of site '{peer}'|belong together"):
            sites.server.open([replace(messages[0], **{kind: shares}), *messages[1:]])


def test_missing_shares_and_another_list_are_refused_by_the_server(sites):
    survivors = sites.until_masked()
    checks = sites.check(survivors)
    with pytest.raises(FedLDError, match="another list"):
        sites.server.confirm([replace(checks[0], survivors=NAMES[:4]), *checks[1:]])
    wrong = ConsistencyCheck(
        context=sites.context.digest, site="athens", survivors=NAMES, signature="00" * 64
    )
    with pytest.raises(FedLDError, match="signature of site 'athens'"):
        sites.server.confirm([wrong, *checks[1:]])
    sites.server, proof = sites.server.confirm(checks)
    messages = sites.unmask(proof)
    with pytest.raises(FedLDError, match="exactly one share"):
        sites.server.open([replace(messages[0], seed_shares={}), *messages[1:]])


def test_a_site_must_make_an_envelope_for_every_peer(sites):
    sites.server, keys = sites.server.list_keys(sites.begin())
    shares = sites.share(keys)
    with pytest.raises(FedLDError, match="one envelope for each"):
        sites.server.deliver([replace(shares[0], envelopes={}), *shares[1:]])


# What masked vectors look like.


def masked_twice(folder, length=20_000, bits=32):
    """The masked vectors of one site in two rounds, of a vector of zeros."""
    vectors = []
    for round_ in (1, 2):
        sites = Sites(folder, code=coding(5, length, bits), round=round_)
        sites.vectors["athens"][:] = 0
        vectors.append(sites.mask(sites.until_shared(), ["athens"])[0].vector)
    return vectors


def test_a_masked_vector_looks_uniform(tmp_path):
    """Chi-squared of every byte and of every bit; the thresholds are those of p = 1e-6."""
    vector = masked_twice(tmp_path)[0]
    for k in range(4):
        counts = np.bincount((vector >> (8 * k)) & 255, minlength=256)
        expected = len(vector) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 371
    bits = np.unpackbits(vector.view(np.uint8)).reshape(len(vector), 32).mean(0)
    assert np.abs(bits - 0.5).max() < 5.5 * 0.5 / len(vector) ** 0.5


def test_masks_of_two_rounds_and_neighbouring_coordinates_are_independent(tmp_path):
    first, second = masked_twice(tmp_path)
    for one, other in ((first, second), (first[1:], first[:-1]), (first, first - second)):
        correlation = np.corrcoef(one.astype(float), other.astype(float))[0, 1]
        assert abs(correlation) < 5.5 / len(one) ** 0.5
    assert (first == second).mean() < 1e-3
    counts = np.histogram2d(first >> 28, second >> 28, bins=16)[0]
    expected = len(first) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 371


def test_all_masked_vectors_but_one_still_look_uniform(sites):
    """The sum of four of five masked vectors has the masks with the fifth left in it."""
    inputs = sites.mask(sites.until_shared())
    partial = sum((m.vector for m in inputs[:4]), start=np.zeros(6, "<u4"))
    exact = sum((sites.coded(name) for name in NAMES[:4]), start=np.zeros(6, "<u4"))
    assert (partial != exact).all()


def test_secrets_are_not_printed(sites):
    sites.until_shared()
    site = sites.sites["athens"]
    text = repr(site)
    for secret in (site.seed, site.mask_secret, site.envelope_secret):
        assert repr(secret) not in text
        assert secret.hex() not in text
