"""A site's real message handler in secure rounds under a hostile server: what it refuses and writes."""

import json
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from pydantic import TypeAdapter

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.deployment.keys import make_peer_key
from fedld.engine.backends.flower import site as site_module
from fedld.engine.backends.flower.secure_site import HeldResult
from fedld.engine.backends.flower.wire import Answer, carried, carried_bytes, pack, tree_names, unpack
from fedld.engine.network import divided, make_layout
from fedld.errors import FedLDError
from fedld.privacy.context import public_key
from fedld.privacy.journal import Journal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ShareDelivery,
    SurvivorList,
    SurvivorProof,
    from_bytes,
    to_bytes,
)
from fedld.privacy.numbered import SiteSide, answer_sum, begin_sum, open_sum
from fedld.privacy.peers import peers_text, read_identity
from fedld.records.ledger import Ledger

CLASSES = list("0123456789")
PEERS = ("beta", "delta", "gamma", "omega")
ALL = ("alpha", *PEERS)
TRAIN = {"kind": "train", "round": 1, "slot": 0, "incoming": {"client": "alpha"}}
LOSS = {"kind": "loss", "clients": ["alpha"], "validation": True}
TEST = {"kind": "site-test", "incoming": {"client": "alpha"}}
PLAIN_TEST = {"jobs": (TEST,), "secure": False, "settings": ""}
SECURE = 'secure = "sum"\nclient_losses = false'


def weights(scale=0.1):
    experiment = make_experiment({})
    method = make_method(experiment)
    federation = type(
        "F",
        (),
        {"input_shape": (1, 8, 8), "classes": CLASSES, "outputs": len(CLASSES), "output_shape": (10,)},
    )
    size = make_layout(experiment, method, divided(experiment, method, federation)[1]).size
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(0))


class Server:
    """A server that asks alpha whatever it likes, and four peers that it controls only by their messages."""

    def __init__(self, folder, data):
        self.folder, self.run, self.attempt = folder / "alpha", uuid4().hex, 1
        make_peer_key("alpha", folder)
        self.identities = {name: Ed25519PrivateKey.generate() for name in PEERS}
        self.identities["alpha"] = read_identity(folder / "alpha.peer.key")
        self.folder.mkdir()
        self.pin({name: public_key(one) for name, one in self.identities.items()})
        self.config = {"site": "alpha", "data": str(data), "state": str(folder), "min-images": 2}
        self.config["peer-key"] = str(folder / "alpha.peer.key")
        self.peers, self.first = {}, {}

    def pin(self, keys):
        (self.folder / "peers.toml").write_text(peers_text(keys))

    def send(self, kind, part, **trees):
        content = pack(Answer(), **trees)
        content.config_records["part"]["json"] = json.dumps(part)
        context = Context(0, 1, self.config, RecordDict(), {})
        return site_module.app(Message(content, 1, kind), context).content

    def order(self, participants=ALL, settings=SECURE, scale=0.1, secure=True, jobs=(TRAIN,), **more):
        part = {"version": __version__, "run": self.run, "kept": [], "jobs": list(jobs), "sites": 5}
        part |= {"settings": settings, "classes": CLASSES, "mean": [0.5], "std": [0.3], **more}
        if secure:
            part["secure"] = {"participants": list(participants), "largest": 400, "attempt": self.attempt}
        return self.send("train", part, weights={"weights": weights(scale)})

    def step(self, number, content, context=None, request=None):
        """Alpha's message, or its reason to refuse."""
        digest = self.context.digest if context is None else context
        part = {"version": __version__, "run": self.run, "number": number, "context": digest}
        reply = self.send("train.secure", part | {"request": request}, secure=carried(content))
        error = unpack(Answer, reply).error
        return carried_bytes(reply) if error is None else error

    @property
    def context(self):
        if (self.secure / "held.json").exists():
            self.held = TypeAdapter(HeldResult).validate_json((self.secure / "held.json").read_bytes())
        return self.held.context(
            self.attempt, {name: public_key(one) for name, one in self.identities.items()}
        )

    @property
    def secure(self):
        return self.folder / self.run / "secure"

    def side(self, name):
        vector = np.full(self.context.code.length, 0.001)
        return SiteSide(
            site=name,
            identity=self.identities[name],
            journal=Journal(self.folder / f"{name}.jsonl"),
            vector=lambda context: context.code.encode(vector, 1),
        )

    def begin(self):
        """Alpha trains and all begin a sum."""
        reply = self.order()
        assert unpack(Answer, reply).error is None, unpack(Answer, reply).error
        self.first = {"alpha": carried_bytes(reply)}
        for name in PEERS:
            self.peers[name], self.first[name] = begin_sum(self.context, self.side(name))
        return reply

    def open(self, until=9, lost=None):
        """Open the sum; message `until` is the first that is not carried. Gives what was said to alpha."""
        said = {}
        lost = lost or {}

        def ask(number, answers):
            said[number] = answers["alpha"]
            if number >= until:
                raise StopIteration
            found = {}
            for name, content in answers.items():
                if number >= lost.get(name, 9):
                    continue
                if name == "alpha":
                    found[name] = self.step(number, content)
                    assert isinstance(found[name], bytes), found[name]
                else:
                    self.peers[name], found[name] = answer_sum(
                        self.peers[name], number, content, self.side(name)
                    )
            return found

        with suppress(StopIteration):
            self.opened = open_sum(self.context, self.first, ask, print)
        return said


@pytest.fixture
def server(monkeypatch, tmp_path, digits):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setenv("FEDLD_CACHE", str(digits / "cache"))
    return Server(tmp_path, digits / "alpha.npz")


def test_a_result_stays_at_the_site_and_its_sum_is_opened_in_five_messages(server):
    reply = server.begin()
    assert tree_names(reply) == ["secure"]
    result = unpack(Answer, reply).results[0]
    assert result.pop("seconds") > 0
    nothing = {"message": {}, "metrics": {}, "before": None, "after": None}
    assert result == nothing | {"has_state": False, "finite": True}
    assert "training" in unpack(Answer, reply).held.entries  # losses are part of the sum
    assert server.secure.stat().st_mode & 0o077 == 0
    said = server.open(lost={"omega": 3})
    total = server.context.code.decode(server.opened.total)
    assert server.opened.survivors == ("alpha", "beta", "delta", "gamma")
    assert np.abs(total).max() > 0.003
    assert not (server.secure / "state.json").exists()
    assert not (server.secure / "held.npy").exists()
    assert "in no secure computation" in server.step(3, said[3])  # a vector after unmasking
    told = Ledger(server.folder / "ledger.jsonl").check().entries
    assert [entry.get("message") for entry in told] == [None, 2, 3, 4, 5, None]
    assert "refused" in told[-1]


def test_a_hostile_relay_is_refused(server):
    server.begin()
    said = server.open(until=2)
    forged = json.loads(said[2])
    mallory = Ed25519PrivateKey.generate()
    one = from_bytes(AdvertiseKeys, server.first["beta"])
    wrong = server.context.sign(mallory, "keys", "beta", *one.signed)
    forged["keys"][1]["signature"] = wrong
    assert "signature of site 'beta' is not valid" in server.step(2, json.dumps(forged).encode() + b"\n")
    without = {**json.loads(said[2]), "keys": json.loads(said[2])["keys"][1:]}
    assert "own keys" in server.step(2, json.dumps(without).encode() + b"\n")
    assert "another secure computation" in server.step(2, said[2], context="0" * 64)
    assert isinstance(server.step(2, said[2]), bytes)
    assert "out of order" in server.step(2, said[2])  # a replay
    assert "already taken" in unpack(Answer, server.order()).error  # of the whole order, too


def test_another_model_or_list_of_sites_gives_another_context(server):
    server.begin()
    context = server.context
    server.attempt = 2
    other_model = carried_bytes(server.order(scale=0.2))
    server.attempt = 3
    other_sites = carried_bytes(server.order(participants=ALL[:4]))
    digests = {from_bytes(AdvertiseKeys, one).context for one in (other_model, other_sites)}
    assert len(digests | {context.digest}) == 3
    refused = []
    first = server.first | {"alpha": other_model}
    with suppress(StopIteration):
        open_sum(context, first, lambda *_: next(iter(())), lambda site, why: refused.append((site, why)))
    assert refused[0][0] == "alpha"
    assert "another computation" in refused[0][1]


def test_both_kinds_of_shares_are_never_given(server):
    """Asked for in one message, in two, and after a restart with an old state."""
    server.begin()
    said = server.open(until=4)
    listed = from_bytes(SurvivorList, said[4])
    before = (server.secure / "state.json").read_bytes()
    twice = replace(listed, survivors=(*listed.survivors[:2], "beta", *listed.survivors[2:]))
    assert "names a site twice" in server.step(4, to_bytes(twice))
    few = replace(listed, survivors=listed.survivors[:3])
    assert "4 are needed" in server.step(4, to_bytes(few))
    without = replace(listed, survivors=("alpha", "beta", "delta", "gamma"))
    assert isinstance(server.step(4, to_bytes(listed)), bytes)
    assert "out of order" in server.step(4, to_bytes(without))
    (server.secure / "state.json").write_bytes(before)  # as after a restart from a copy
    assert "already taken" in server.step(4, to_bytes(without))


def test_a_round_is_opened_once_and_only_with_signatures_of_one_list(server):
    server.begin()
    said = server.open(until=5)
    proof = from_bytes(SurvivorProof, said[5])
    few = replace(proof, signatures=dict(list(proof.signatures.items())[:3]))
    assert "4 are needed" in server.step(5, to_bytes(few))
    signed = server.context.sign(server.identities["beta"], "survivors", "alpha", "beta", "delta", "gamma")
    other = replace(proof, signatures={**proof.signatures, "beta": signed})
    assert "signature of site 'beta' is not valid" in server.step(5, to_bytes(other))
    before = {name: (server.secure / name).read_bytes() for name in ("state.json", "held.json", "held.npy")}
    assert isinstance(server.step(5, to_bytes(proof)), bytes)
    for name, content in before.items():
        (server.secure / name).write_bytes(content)
    assert "already taken" in server.step(5, to_bytes(proof))
    server.attempt, server.peers = 2, {}  # a further attempt of the same round, over other survivors
    request = {"participants": list(ALL), "largest": 400, "attempt": 2}
    server.first = {"alpha": server.step(1, b"", request=request)}
    for name in PEERS:
        server.peers[name], server.first[name] = begin_sum(server.context, server.side(name))
    said = server.open(until=5, lost={"omega": 3})
    assert "already taken" in server.step(5, said[5])


@pytest.mark.parametrize(
    ("policy", "order", "reason"),
    [
        ('updates = "summed"', {"secure": False, "settings": ""}, "leave in secure sums only"),
        (None, {"secure": False}, "leave in secure sums only"),
        (None, {"settings": ""}, "no result of which a secure sum"),
        (None, {"jobs": (TRAIN, LOSS)}, "nothing that it measures leaves by itself"),
        (None, {"jobs": (TEST,), "secure": False}, "nothing that it measures leaves by itself"),
        ('updates = "gram"', PLAIN_TEST, "what it measures leaves in secure sums only"),
        (None, {"participants": ALL[:2]}, "at least 3 sites, not 2"),
        (None, {"participants": ALL[1:]}, "not a participant"),
        (None, {"participants": (*ALL, "mallory")}, "'mallory' has no pinned key"),
        (None, {"participants": (*ALL, "beta")}, "named twice"),
        ("min_sites = 4", {"participants": ALL[:3]}, "at least 4 sites, not 3"),
        ("min_sites = 'x'", {}, "everything is refused"),
    ],
)
def test_what_a_site_refuses_before_it_trains_or_sums(server, policy, order, reason):
    if policy is not None:
        (server.folder / "policy.toml").write_text(policy)
        server.config["policy"] = True
    assert reason in unpack(Answer, server.order(**order)).error


def test_a_policy_holds_for_the_survivors_too_and_no_pins_mean_no_secure_round(server):
    server.config["policy"] = True
    (server.folder / "policy.toml").write_text('updates = "summed"\nmin_sites = 5')
    server.begin()
    said = server.open(until=4, lost={"omega": 3})
    assert "at least 5 sites, not 4" in server.step(4, said[4])
    (server.folder / "policy.toml").write_text("no policy")
    assert "everything is refused" in server.step(4, said[4])
    del server.config["policy"]
    server.pin({"alpha": "0" * 64})
    assert "no secure round" in server.step(4, said[4])
    del server.config["peer-key"]
    assert "no pinned keys" in unpack(Answer, server.order()).error


def test_a_delivery_with_anothers_envelope_or_of_few_peers_is_refused(server):
    server.begin()
    said = server.open(until=3)
    delivery = from_bytes(ShareDelivery, said[3])
    few = replace(delivery, envelopes=dict(list(delivery.envelopes.items())[:2]))
    assert "4 are needed" in server.step(3, to_bytes(few))
    swapped = dict(zip(delivery.envelopes, [*delivery.envelopes.values()][::-1], strict=True))
    assert isinstance(server.step(3, to_bytes(replace(delivery, envelopes=swapped))), str)
    with pytest.raises(FedLDError):
        from_bytes(ShareDelivery, server.step(3, said[3]))
