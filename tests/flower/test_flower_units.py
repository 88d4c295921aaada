"""Orders and replies without processes: what a site refuses from a server, and a server from a site."""

import io
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file

from fedld import __version__
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_data_spec
from fedld.data import load
from fedld.deployment import supervisor
from fedld.deployment.control import _follow, flower_defaults
from fedld.deployment.supervisor import BoundedGrid, unfolded_size
from fedld.engine import loop, worker
from fedld.engine.backends.flower import site as site_module
from fedld.engine.backends.flower.disclosure import SiteDraws
from fedld.engine.backends.flower.engine import FlowerEngine
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.backends.flower.simulation import export, virtual_sites
from fedld.engine.backends.flower.sites import Sites, content_of
from fedld.engine.backends.flower.wire import Answer, Order, Question, pack, site_name, size, tree, unpack
from fedld.engine.checkpoint import load_checkpoint
from fedld.engine.jobs import Failure
from fedld.engine.network import load_model
from fedld.errors import FedLDError
from fedld.methods import METHODS
from fedld.models import build
from fedld.records.ledger import Ledger
from fedld.records.schema import CLIENTS, CROSS_LOSS, ROUNDS
from fedld.records.tables import read_predictions
from fedld.records.writer import read_checksummed, read_lines
from fedld.study.card import make_card

SITES = ("alpha", "beta", "gamma")


@pytest.fixture(autouse=True)
def cache(monkeypatch, digits):
    monkeypatch.setenv("FEDLD_CACHE", str(digits / "cache"))


@pytest.fixture
def grid(make_grid, digits):
    return make_grid(digits)


def experiment(digits, **settings):
    common = {"clients": 3, "rounds": 1, "min_clients": 2, "on_client_failure": "skip", "wait_for_clients": 0}
    return make_experiment(common | {"dry_run": False} | {"dataset": f"npz:{digits}/test.npz"} | settings)


def go(grid, digits, tmp_path, **settings):
    out = tmp_path / "run"
    loop.run(experiment(digits, **settings), out, engine=FlowerEngine(grid, out))
    return {line["client"]: line.get("excluded") for line in read_lines(out, CLIENTS)}


def changed(update=None, part=None, **trees):
    """A reply with another update, other words or further trees."""

    def spoil(message, reply):
        answer = unpack(Answer, reply.content)
        mine = {name: tree(reply.content, name) for name in ("update", "message")} | trees
        if update is not None and mine["update"]:
            mine["update"] = {"update": update(mine["update"]["update"])}
        return Message(pack(part(answer) if part else answer, **mine), reply_to=message)

    return spoil


def silent(message, reply):
    return None


def malformed(message, reply):
    content = pack(Answer())
    content.config_records["part"]["json"] = '{"results": [{"metrics": {"steps": "many"}}], "extra": 1}'
    return Message(content, reply_to=message)


def with_metrics(answer, metrics):
    return Answer(results=[answer.results[0] | {"metrics": metrics}])


def replaced(change):
    """A reply whose update's array is changed by hand."""

    def spoil(message, reply):
        for array in reply.content.array_records.get("tree.update", {}).values():
            change(array)
        return reply

    return spoil


def said(text):
    def spoil(message, reply):
        reply.content.config_records["part"]["json"] = text
        return reply

    return spoil


def pickled():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PICKLED = pickled()
NAN = torch.tensor(float("nan"))
BAD = {
    "silent": (silent, "no reply within"),
    "malformed": (malformed, "malformed"),
    "short": (changed(update=lambda u: u[:-1]), "is not a float32 vector"),
    "double": (changed(update=torch.Tensor.double), "is not a float32 vector"),
    "not finite": (changed(update=lambda u: u.index_fill(0, torch.tensor([3]), NAN)), "not finite"),
    "large": (changed(more={"x": torch.zeros(8_000_000)}), "bytes, more than"),
    "other message": (changed(message={"x": torch.zeros(2)}), "another structure"),
    "no metrics": (
        changed(part=lambda a: with_metrics(a, {})),
        "lack 'steps'",
    ),
    "forged": (
        changed(part=lambda a: with_metrics(a, {**a.results[0].get("metrics", {}), "Round": 7.0})),
        "the answer is malformed",
    ),
    "many metrics": (
        changed(part=lambda a: with_metrics(a, {f"m{k}": 0.0 for k in range(99)})),
        "the answer is malformed",
    ),
    "other stype": (replaced(lambda array: setattr(array, "stype", "pickle")), "its reply is malformed"),
    "object array": (replaced(lambda array: setattr(array, "data", PICKLED)), "its reply is malformed"),
    "garbage": (replaced(lambda array: setattr(array, "data", b"garbage")), "its reply is malformed"),
    "deep": (said("[" * 100_000), "the answer is malformed"),
    "not even text": (said(b"\xff\xfe"), "the answer is malformed"),
    "no part": (lambda message, reply: Message(RecordDict(), reply_to=message), "the answer is malformed"),
    "escapes": (changed(part=lambda a: Answer(error="\x1b[2Jall is well\n" * 999)), "\\x1b[2Jall is well\\n"),
    "too few": (changed(part=lambda a: Answer()), "answered 0 of 1"),
    "error": (changed(part=lambda a: Answer(error="the disk is full")), "the disk is full"),
    "other result": (changed(part=lambda a: Answer(results=[{"models": {}}])), "the answer is malformed"),
    "impossible time": (
        changed(part=lambda a: Answer(results=[a.results[0] | {"seconds": -1.0}])),
        "the answer is malformed",
    ),
    "boast": (
        changed(
            update=lambda u: u.index_fill(0, torch.tensor([3]), NAN),
            part=lambda a: Answer(results=[a.results[0] | {"finite": True}]),
        ),
        "not finite",
    ),
}


REASONS = {
    "silent": "late",
    "not finite": "not finite",
    "boast": "not finite",
    "error": "failed",
    "escapes": "failed",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_by_name_and_the_run_goes_on(grid, digits, tmp_path, kind):
    grid.spoil["beta"], reason = BAD[kind]
    excluded = go(grid, digits, tmp_path)
    assert reason in excluded["beta"]
    assert len(excluded["beta"]) < 1500
    assert excluded["beta"].isprintable()
    (line,) = read_lines(tmp_path / "run", ROUNDS)
    assert line["missing"] == {"beta": REASONS.get(kind, "malformed")}
    assert excluded["alpha"] is None
    assert excluded["gamma"] is None


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("before", "loss", -0.2),
        ("before", "loss", 1e308),
        ("before", "count", -7),
        ("before", "count", 2**52),
        ("after", "sums", {"correct": 500}),
        ("after", "loss_squared", -1.0),
        ("metrics", "steps", -5.0),
        ("metrics", "steps", 0.5),
        ("metrics", "train_loss", 1e3),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(grid, digits, tmp_path, part, key, value):
    """The same lies in real processes are those of `test_a_lying_site_is_left_out_and_chooses_no_model`."""

    def lie(answer):
        (result,) = answer.results
        return Answer(results=[result | {part: result[part] | {key: value}}] if part in result else [result])

    grid.spoil["beta"] = changed(part=lie)
    excluded = go(grid, digits, tmp_path)
    assert excluded.pop("beta")
    assert not any(excluded.values())


def test_an_update_of_a_hundred_times_the_length_is_refused(grid, digits, tmp_path):
    grid.spoil["beta"] = changed(update=lambda u: 100 * u)
    excluded = go(grid, digits, tmp_path, **{"max_update_ratio": flower_defaults({})["max_update_ratio"]})
    assert excluded["beta"]
    assert read_lines(tmp_path / "run", ROUNDS)[0]["missing"] == {"beta": "rejected"}


def test_the_dry_run_names_who_cannot_train_before_anything_is_spent(grid, digits, tmp_path, capsys):
    def full(message, reply):
        return Message(pack(Answer(error="the disk is full")), reply_to=message)

    grid.spoil["beta"] = full
    go(grid, digits, tmp_path, dry_run=True)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"dry_run"' in line]
    assert {line["client"]: "why" in line for line in told} == {"alpha": False, "beta": True, "gamma": False}
    assert all(line["memory"] > 1e6 for line in told if "memory" in line)
    assert not list((tmp_path / "state").glob("*/*/states/*"))
    with pytest.raises(FedLDError, match=r"2 of 3 sites can train, 3 are needed \(beta: the disk is full\)"):
        loop.run(
            experiment(digits, dry_run=True, min_clients="all"),
            tmp_path / "other",
            engine=FlowerEngine(grid, tmp_path / "other"),
        )
    assert not (tmp_path / "other" / "clients.jsonl").exists()


def test_the_dry_run_of_a_resumed_run_has_the_states_that_sites_kept(grid, digits, tmp_path):
    settings = {"method": "scaffold", "momentum": 0.0, "rounds": 2, "dry_run": True}
    out = tmp_path / "run"

    def stop(event):
        if event["event"] == "round":
            raise KeyboardInterrupt

    with pytest.raises(loop.Interrupted):
        loop.run(experiment(digits, **settings), out, progress=stop, engine=FlowerEngine(grid, out))
    loop.resume(out, engine=FlowerEngine(grid, out))
    assert {line["round"] for line in read_lines(out, CLIENTS) if "excluded" not in line} == {1, 2}


def test_the_ledgers_tell_what_left(grid, digits, tmp_path):
    grid.spoil["beta"] = silent
    go(grid, digits, tmp_path)
    server = Ledger(tmp_path / "run" / "ledger.jsonl")
    found = server.check()
    assert found.problem is None
    assert [entry["kind"] for entry in found.entries][:2] == ["run", "order"]
    rounds = {entry["site"]: entry for entry in found.entries if entry.get("rounds") == [1]}
    site = Ledger(tmp_path / "state" / "alpha" / "ledger.jsonl").check()
    assert site.problem is None
    assert [entry["kind"] for entry in site.entries] == ["description", "order", "order"]
    assert [entry["jobs"] for entry in site.entries[1:]] == [{"train": 1}, {"site-test": 1}]
    left = site.entries[1]["left"]
    assert left == rounds["alpha"]["received"]
    assert left["update.update"][1] > 4 * left["update.update"][0][0]
    assert rounds["beta"]["missing"] == "late"
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as model:
        assert model.metadata()["ledger"] == found.head


def test_a_run_across_sites_has_a_card_and_a_model_to_use(grid, digits, tmp_path):
    grid.spoil["beta"] = silent
    go(grid, digits, tmp_path, rounds=2, grace=0.1, round_timeout=600)
    card = make_card(tmp_path / "run")
    told = card.to_json()
    assert {one["name"]: one["train"] for one in told["data"]["clients"]}.keys() == {"alpha", "beta", "gamma"}
    assert told["participation"]["beta"]["took_part"] == 0
    assert told["model_file"]["ledger"] in card.to_markdown()
    assert any("beta is missing" in line for line in told["limitations"])
    with np.load(digits / "test.npz") as arrays:
        seen = load_model(tmp_path / "run").probabilities(arrays["images"][..., None])
    saved = read_predictions(tmp_path / "run" / "predictions.csv").probabilities
    np.testing.assert_allclose(np.sort(seen, axis=0), np.sort(saved, axis=0), atol=1e-5)


def lying(answer):
    """Results that cannot be."""
    spoiled = [
        one | {"models": {k: impossible(m) for k, m in one["models"].items()}} if "models" in one else one
        for one in answer.results
    ]
    return answer.model_copy(update={"results": spoiled})


def impossible(result):
    return result | {"accuracy": result["accuracy"] | {"value": 1.5}}


def test_sites_measure_the_final_models_on_their_own_test_images(grid, digits, tmp_path):
    """The same numbers as on one machine; nothing of a site with few test images, or of one that lies."""
    settings = {"method": "fedbn", "model": "resnet8"}
    grid.spoil["beta"] = changed(part=lying)
    grid.nodes[3].node_config["min-images"] = 45
    go(grid, digits, tmp_path, **settings)
    here = loop.run(
        experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0), tmp_path / "here"
    )
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["sites"]
    assert 20 < here["sites"]["gamma"]["global"]["pictures"] < 45
    assert told.keys() == {"alpha"}
    for which in ("personal", "global"):  # three decimals leave a site
        for key in ("accuracy", "auroc", "sensitivity"):
            ours = here["sites"]["alpha"][which][key]
            assert told["alpha"][which][key] == pytest.approx(ours, abs=5.01e-4)
    assert "| alpha | personal |" in make_card(tmp_path / "run").to_markdown()


def test_sites_choose_the_best_round_by_images_they_set_aside(grid, digits, tmp_path):
    """A site with few images trains on all of them and has no say."""
    grid.nodes[3].node_config["min-images"] = 45
    go(grid, digits, tmp_path, rounds=2, validation=0.25, batch_size=24)
    lines, clients = (read_lines(tmp_path / "run", file) for file in (ROUNDS, CLIENTS))
    assert abs(lines[0]["validation"]["count"] - 0.25 * (240 + 104)) < 8  # alpha's and beta's
    assert {line["client"]: line["steps"] for line in clients} == {"alpha": 8, "beta": 4, "gamma": 4}
    with safe_open(tmp_path / "run" / "best.safetensors", "pt") as model:
        facts = model.metadata()
    assert int(facts["round"]) == min(lines, key=lambda line: line["validation"]["loss"])["round"]
    assert facts["ledger"] == Ledger(tmp_path / "run" / "ledger.jsonl").check().head


def test_participation_is_summed_up(grid, digits, tmp_path):
    grid.spoil["beta"] = silent
    go(grid, digits, tmp_path, rounds=2, grace=0.1, round_timeout=600)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["participation"] == {
        "alpha": {"drawn": 2, "took_part": 2, "missing": {}, "gone_since": None},
        "beta": {"drawn": 2, "took_part": 0, "missing": {"late": 2}, "gone_since": 1},
        "gamma": {"drawn": 2, "took_part": 2, "missing": {}, "gone_since": None},
    }


def test_below_quorum_nothing_is_aggregated(grid, digits, tmp_path):
    grid.spoil |= {"alpha": silent, "beta": BAD["error"][0]}
    with pytest.raises(
        FedLDError, match=r"round 1: 1 usable clients, at least 2 .*alpha: no reply.*disk is full"
    ):
        go(grid, digits, tmp_path)
    assert not (tmp_path / "run" / "clients.jsonl").exists()


def test_there_is_one_hint_how_to_go_on(grid, digits, tmp_path):
    def leave(event):
        if event["event"] == "round":
            grid.spoil |= {"alpha": silent, "beta": silent}

    out = tmp_path / "runs" / "one"
    with pytest.raises(FedLDError, match="round 3: 1 usable clients") as caught:
        loop.run(experiment(digits, rounds=4), out, progress=leave, engine=FlowerEngine(grid, out))
    hint = f"continue with: fedld run --engine flower --server {out.parent} --resume {out}"
    assert str(caught.value).count("continue with") == str(caught.value).count(hint) == 1
    events = [json.dumps({"event": "error", "error": str(caught.value), "resumable": True})]
    control = SimpleNamespace(follow=lambda run: events)
    with pytest.raises(FedLDError) as passed_on:
        _follow(control, 1, out.parent, out, loop.quiet)
    assert str(passed_on.value) == str(caught.value)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"central"}))
def test_every_method_is_the_same_as_on_this_machine(grid, digits, tmp_path, method, monkeypatch):
    draws = lambda setup, seed: SiteDraws(setup, seed, Limits(min_images=2))  # noqa: E731
    monkeypatch.setattr(worker, "Draws", draws)  # as a site: enough images of every class that is measured
    settings = {"method": method, "rounds": 2, "model": "resnet8" if method == "fedbn" else "cnn"}
    if METHODS[method].second_moments:
        settings["train"] = "head"
    go(grid, digits, tmp_path, **settings)
    here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
    loop.run(here, tmp_path / "here")
    ours, theirs = (load_checkpoint(tmp_path / place / "checkpoints")[0] for place in ("here", "run"))
    assert ours.server.weights.equal(theirs.server.weights)
    assert all(value.equal(theirs.server.extra[key]) for key, value in ours.server.extra.items())
    line = read_lines(tmp_path / "run", ROUNDS)[-1]
    if METHODS[method].personalised:
        assert 0 <= line["personal_own"]["accuracy"] <= 1
        assert "personal" not in line


def test_a_closed_start_and_sums_that_come_later_are_the_same_as_on_this_machine(grid, digits, tmp_path):
    """With two sites in a round one may have sent its sums before."""
    for name, more in (("start", {"start": "closed"}), ("ridge", {"method": "ridge", "sample_clients": 2})):
        settings = {"rounds": 3, "train": "head", "model": "cnn", **more}
        here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
        go(grid, digits, tmp_path / name, **settings)
        loop.run(here, tmp_path / name / "here")
        ours, theirs = (load_file(tmp_path / name / place / "model.safetensors") for place in ("here", "run"))
        assert all(value.equal(theirs[key]) for key, value in ours.items())
        assert all(line["clients"] >= 2 for line in read_lines(tmp_path / name / "run", ROUNDS))


@pytest.mark.parametrize("train", ["head", "last:2"])
def test_a_frozen_trunk_stays_where_it_is(grid, digits, tmp_path, train):
    """Only the trained part is on the wire, in either direction; features lie beside each site's pixels."""
    seen = []
    grid.spoil["alpha"] = lambda message, reply: seen.append((message.content, reply.content)) or reply
    settings = {"method": "fedbn", "rounds": 2, "model": "resnet8", "train": train, "seed": 4}
    go(grid, digits, tmp_path, **settings)
    here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
    summary = loop.run(here, tmp_path / "here")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("here", "run"))
    assert all(value.equal(theirs[key]) for key, value in ours.items())
    trained = load_checkpoint(tmp_path / "here" / "checkpoints")[0].server.weights
    assert summary["trained_parameters"] <= len(trained) < summary["parameters"] / 1.3
    for sent, received in seen:
        assert tree(sent, "weights")["weights"].shape == trained.shape
        assert size(received) <= 4 * 2 * len(trained)
    kept = {len(np.load(file, mmap_mode="r")) for file in (digits / "cache").glob("*/features-*.npy")}
    assert {len(np.load(digits / f"{site}.npz")["labels"]) for site in SITES} <= kept


def test_a_site_with_another_trunk_says_so(grid, digits, tmp_path):
    other = build("resnet8", classes=3, channels=1, image_size=8, seed=9).state_dict()
    torch.save(other, tmp_path / "other.pth")
    grid.nodes[2].node_config["weights"] = str(tmp_path / "other.pth")
    found = go(grid, digits, tmp_path, model="resnet8", train="head")
    assert "another one" in found["beta"]
    assert found["alpha"] is None


def test_what_is_private_is_not_sent(grid, digits, tmp_path):
    seen = []
    grid.spoil["alpha"] = lambda message, reply: seen.append(reply.content) or reply
    go(grid, digits, tmp_path, method="fedbn", model="resnet8")
    (state,) = (tmp_path / "state" / "alpha").glob("*/states/*")
    private = load_tensors(read_checksummed(state))["private"]
    sent = torch.cat([tree(seen[0], name)[key] for name in ("update",) for key in tree(seen[0], name)])
    assert np.isin(private.numpy(), sent.numpy()).mean() < 0.1  # a few of many numbers are alike by chance


def test_a_decomposition_needs_whole_models(grid, digits, tmp_path):
    with pytest.raises(FedLDError, match="set decompose = 0"):
        go(grid, digits, tmp_path, method="fedbn", model="resnet8", decompose=1)


def test_central_is_not_for_sites(grid, digits, tmp_path):
    with pytest.raises(FedLDError, match="pools"):
        go(grid, digits, tmp_path, method="central")


def question(classes="0123456789", version=__version__, size=None):
    return Question(version=version, classes=list(classes), image_size=size)


def refused(grid, shape=(8, 8, 1), **facts):
    sites = Sites(grid, question(**facts), shape)
    sites.wait(9, 0)
    return sites.refused


def test_other_classes_shapes_versions_and_names_are_refused(grid, digits, tmp_path, monkeypatch):
    assert refused(grid) == {}
    assert "class '9' is not one of" in refused(grid, classes="012345678")["node 1"]
    assert refused(grid, shape=(8, 8, 3))["beta"] == "its images are 8 x 8 x 1, the server's 8 x 8 x 3"
    assert "the server 9.9" in refused(grid, version="9.9")["node 2"]
    grid.join(2, "beta", name="delta")
    assert refused(grid) == {"beta": "its key is registered for 'delta'"}
    grid.join(2, "../beta", data=digits / "beta.npz")
    assert "letters, digits" in refused(grid)["node 2"]
    grid.join(2, "beta", data="/etc/passwd")
    assert refused(grid)["node 2"] == "its data cannot be opened: try `fedld site check` there"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"train": 300_000_000}, "malformed"),
        ({"train": 9_000_000}, "label counts do not add up"),
        ({"label_counts": [240]}, "label counts do not add up"),
        ({"label_counts": [10**9] * 10}, "label counts do not add up"),
        ({"pixel_sums": ([10**15], [10**15])}, "sums of pixels do not fit"),
        ({"pixel_sums": ([10**400], [1])}, "malformed"),
        ({"pixel_sums": ([1, 1], [1, 1])}, "sums of pixels do not fit"),
        ({"shape": (10**9, 1, 1)}, "malformed"),
        ({"version": "9" * 10**6}, "malformed"),
        ({"site": "\x1b[2J"}, "malformed"),
    ],
)
def test_a_description_that_cannot_be_is_refused(grid, facts, reason):
    """Before anything is made of its size: no file of labels, no sum over classes."""

    def lie(message, context):
        reply = site_module.app(message, context)
        if context.node_config["site"] == "alpha":
            told = json.loads(reply.content.config_records["part"]["json"]) | facts
            reply.content.config_records["part"]["json"] = json.dumps(told)
        return reply

    grid.app = lie
    (why,) = refused(grid).values()
    assert reason in why
    assert len(why) < 600
    assert why.isprintable()


def test_one_piece_named_many_times_is_counted_before_it_is_unfolded():
    array = Array(np.zeros(1 << 20, np.uint8))
    contents = {name: one.deflate() for name, one in get_all_nested_objects(array).items()}
    honest = unfolded_size(contents)
    name = array.object_id
    head, _, body = contents[name].partition(b"\x00")
    facts = json.loads(body)
    facts["arraychunk_ids"] *= 3000
    body = json.dumps(facts).encode()
    kind, children, _ = head.split(b" ")
    contents[name] = b" ".join([kind, children, str(len(body)).encode()]) + b"\x00" + body
    assert 2 << 20 < honest < 3 << 20
    assert unfolded_size(contents) > 3000 << 20


class Store:
    """The server's store of a site's reply."""

    def __init__(self, contents, tree):
        self.contents, self.tree, self.confirmed = contents, tree, []

    def PullMessages(self, _):  # noqa: N802
        proto = SimpleNamespace(
            metadata=SimpleNamespace(message_id=self.tree.object_id, reply_to_message_id="m")
        )
        return SimpleNamespace(messages_list=[proto], message_object_trees=[self.tree])

    def PullObject(self, request):  # noqa: N802
        content = self.contents[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.confirmed.append(request.message_object_id)


@pytest.mark.parametrize("largest", [10_000, 1 << 20])
def test_a_reply_is_read_within_bounds(largest):
    metadata = Metadata(1, "", 2, 1, "m", "", 0.0, 60.0, "train")
    message = make_message(metadata, pack(Answer(error="x"), some={"a": torch.zeros(10_000)}))
    contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    grid = BoundedGrid(token="t")
    grid._client = store = Store(contents, get_object_tree(message))
    grid._run = Run.create_empty(1)
    (reply,) = grid.pull_within(["m"], largest)
    assert reply.has_content() == (largest > 80_000)
    assert store.confirmed == [message.object_id]
    if not reply.has_content():
        assert content_of(reply) == Failure("its reply has more than 10000 bytes", "", "malformed")


def test_a_site_may_lack_a_class(grid, digits, tmp_path):
    with np.load(digits / "beta.npz") as found:
        few = found["labels"] < 7
        arrays = {key: found[key][few] for key in ("images", "labels", "split")}
    np.savez(tmp_path / "few.npz", **arrays)
    grid.join(2, "beta", data=tmp_path / "few.npz")
    go(grid, digits, tmp_path)
    assert read_lines(tmp_path / "run", CLIENTS)[1]["label_counts"][7:] == [0, 0, 0]


def test_a_hospitals_folder_of_dicom_and_tiff_of_one_class_trains(
    write_dicom, grid, digits, tmp_path, capsys
):
    """Twelve bits in both; the TIFFs do not say so, the site does. It has one class of ten."""
    for place, name in enumerate((*SITES[:2], "test"), start=1):  # pictures in folders have three channels
        with np.load(digits / f"{name}.npz") as found:
            arrays = {**found, "images": np.repeat(found["images"][..., None], 3, axis=3)}
        np.savez(tmp_path / f"{name}.npz", **arrays)
        grid.join(place, name, tmp_path / f"{name}.npz")
    folder = tmp_path / "ward" / "3"
    folder.mkdir(parents=True)
    for k, image in enumerate(arrays["images"][:30, ..., 0].astype(np.uint16) * 16):
        if k % 2:
            write_dicom(folder / f"p{k // 3}_{k}.dcm", image, bits=12)
        else:
            Image.fromarray(image).save(folder / f"p{k // 3}_{k}.tif")
    common = {"image_size": 8, "dataset": f"npz:{tmp_path}/test.npz"}
    grid.join(3, "gamma", tmp_path / "ward")
    assert go(grid, digits, tmp_path, **common).keys() == {"alpha", "beta"}
    assert "as those of 12-bit scanners do" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    grid.join(3, "gamma", tmp_path / "ward", bits=12, patient="^([^_]+)_")
    assert go(grid, digits, tmp_path, **common) == dict.fromkeys(SITES)
    told = json.loads((tmp_path / "run" / "federation.json").read_text())["clients"]
    assert told[2]["labels"] == [30 * (k == 3) for k in range(10)]
    assert all(line["steps"] for line in read_lines(tmp_path / "run", CLIENTS))


def test_a_site_that_comes_back_must_have_the_same_data(grid, digits, tmp_path):
    sites = Sites(grid, question(), (8, 8, 1))
    sites.fixed = sites.wait(3, 5)
    assert [site.site for site in sites.fixed] == list(SITES)
    del grid.nodes[2]
    sites.refresh()
    assert "beta" not in sites.present
    grid.join(7, "beta", data=digits / "alpha.npz")
    sites.refresh()
    assert sites.refused == {"beta": "it came back with other data"}
    grid.join(8, "beta")
    grid.join(9, "delta", data=digits / "alpha.npz")
    sites.refresh()
    assert sites.present == {"alpha": 1, "gamma": 3, "beta": 8}
    assert sites.refused == {"delta": "it came after the run had begun"}


TRAIN = {"kind": "train", "round": 1, "slot": 0, "incoming": {"client": "alpha"}}


def order(**changes):
    facts = {"version": __version__, "run": "0" * 32, "settings": 'method = "fedavg"', "jobs": []}
    return {**facts, "classes": ["a"], "mean": [0.0], "std": [1.0], "kept": [], **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "../../etc"}, "malformed"),
        ({"site": 10**9}, "malformed"),
        ({"path": "/etc"}, "malformed"),
        ({"jobs": [{"kind": "test", "start": 0, "stop": 1}]}, "malformed"),
        ({"jobs": [TRAIN | {"slot": -1}]}, "malformed"),
        ({"jobs": [TRAIN | {"incoming": {"client": "alpha", "message": {"x": 1}}}]}, "malformed"),
        ({"version": "0.0"}, "it has fedld"),
        ({"settings": 'dataset = "npz:/etc/passwd"'}, "may not set 'dataset'"),
        ({"settings": 'weights = "/etc/passwd"'}, "may not set 'weights'"),
        ({"settings": 'device = "cuda"'}, "may not set 'device'"),
        ({"settings": 'method = "fedavgg"'}, "did you mean 'fedavg'"),
        ({"settings": "method = "}, "not TOML"),
    ],
)
def test_a_site_refuses_what_is_not_the_servers_to_say(grid, changes, reason):
    content = pack(Answer())
    content.config_records["part"]["json"] = json.dumps(order(**changes))
    reply = site_module.app(Message(content, 1, "train"), grid.nodes[1])
    assert reason in unpack(Answer, reply.content).error


def test_everything_survives_the_wire(digits):
    values = {"a": torch.randn(3, 2), "b": torch.tensor(7), "c": torch.tensor([float("inf"), -0.0])}
    part = Order(**order(mean=[0.1, float("nan")]))
    content = pack(part, some=values)
    back = tree(content, "some")
    assert all(
        torch.equal(back[key], value) and back[key].dtype == value.dtype for key, value in values.items()
    )
    assert unpack(Order, content).mean[0] == 0.1
    assert np.isnan(unpack(Order, content).mean[1])


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_decomposition_without_a_site_is_over_the_others(grid, digits, tmp_path, answers):
    """Beta is silent from the start, when models are measured, or after the decomposed round."""
    said_so_far = []

    def leaving(message, reply):
        said_so_far.append(message)
        return reply if len(said_so_far) <= answers else None

    grid.spoil["beta"] = leaving
    go(grid, digits, tmp_path, decompose=5, rounds=2)
    line, cross = (read_lines(tmp_path / "run", file)[0] for file in (ROUNDS, CROSS_LOSS))
    assert line["not_measured"] == cross["not_measured"] == ["beta"]
    assert line["identity_error"] < 1e-12
    sizes, losses = (np.array(cross[key], float)[[0, 2]] for key in ("sizes", "global_losses"))
    assert line["global_loss"] == pytest.approx(sizes @ losses / sizes.sum())
    assert line["test"]["accuracy"] is not None
    card = make_card(tmp_path / "run").to_markdown()
    assert "The losses of beta were not all measured in round 1" in card
    assert "no finite loss" not in card


def test_a_dataset_becomes_sites_of_a_simulation(grid, digits, tmp_path):
    """Flower's simulation tells a node only its number; the rest is as at a real site."""
    settings = {"dataset": "digits", "clients": 3, "rounds": 1, "workers": 0}
    loop.run(make_experiment(settings), tmp_path / "here")
    export(load(make_data_spec(make_experiment(settings))), tmp_path / "sites")
    names = ["client_1", "client_2", "client_3"]
    nodes = {
        k: {
            "site": name,
            "data": f"{tmp_path}/sites/{name}.npz",
            "state": f"{tmp_path}/state",
            "min-images": 2,
        }
        for k, name in enumerate(names)
    }
    app, grid.nodes = virtual_sites(nodes), {}
    for k, name in enumerate(names):
        grid.join(k + 1, name)
        grid.nodes[k + 1].node_config = {"partition-id": k, "num-partitions": 3}
    grid.app = app
    go(grid, digits, tmp_path, dataset=f"npz:{tmp_path}/sites/test.npz")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("here", "run"))
    assert all(value.equal(theirs[key]) for key, value in ours.items())


def test_the_server_knows_how_many_labels_sites_have_and_makes_up_none(grid, digits, tmp_path):
    go(grid, digits, tmp_path)
    assert not (tmp_path / "run/federation").exists()
    facts = json.loads((tmp_path / "run/federation.json").read_text())
    assert [client["name"] for client in facts["clients"]] == list(SITES)
    for client in facts["clients"]:
        with np.load(digits / f"{client['name']}.npz") as file:
            own = np.bincount(file["labels"][file["split"] == "train"], minlength=10)
        assert client["labels"] == own.tolist()
        assert client["train"] == own.sum()


def test_tasks_end_with_the_daemon_that_asked_for_them(monkeypatch, tmp_path):
    """The next daemon does not know their tokens."""
    working, held = subprocess.Popen(["sleep", "60"]), []

    def attend(supervised):
        held.append(set(supervised.tasks))
        supervised.tasks |= {working.pid} if len(held) == 1 else set()
        return 1

    monkeypatch.setattr(supervisor._Supervisor, "_attend", attend)
    monkeypatch.setattr(supervisor._Supervisor, "_fork", lambda *_: 0)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    supervised = supervisor._Supervisor(
        kind="flwr-clientapp", main=lambda: None, daemon=lambda _: None, socket_path=tmp_path / "socket"
    )
    assert supervised.run(lambda _: len(held) < 2) == 1
    assert held == [set(), set()]
    with pytest.raises(ProcessLookupError):
        os.kill(working.pid, 0)


@pytest.mark.parametrize("transform", [["clip:0.5", "quantise:8"], ["topk:0.05"]])
def test_transforms_are_the_same_as_on_this_machine(grid, digits, tmp_path, transform):
    settings = {"method": "scaffold", "rounds": 3, "model": "cnn", "transform": transform}
    go(grid, digits, tmp_path, **settings)
    here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
    loop.run(here, tmp_path / "here")
    ours, theirs = (load_checkpoint(tmp_path / place / "checkpoints")[0] for place in ("here", "run"))
    assert ours.server.weights.equal(theirs.server.weights)
    assert ours.server.extra["c"].equal(theirs.server.extra["c"])
    up = [[line["bytes_up"] for line in read_lines(tmp_path / place, ROUNDS)] for place in ("here", "run")]
    assert up[0] == up[1]


def test_a_coded_update_of_another_form_is_refused(grid, digits, tmp_path):
    def other(message, reply):
        mine = {"update": {"codes": torch.zeros(3, dtype=torch.uint8)}, "message": {}}
        return Message(pack(unpack(Answer, reply.content), **mine), reply_to=message)

    grid.spoil["beta"] = other
    excluded = go(grid, digits, tmp_path, transform=["quantise:8"])
    assert excluded["beta"] == "its update has another form than the run's transforms make"


@pytest.mark.parametrize("name", ["a\n", "a\nb", "", "a/b", "-a"])
def test_a_sites_name_has_no_newline(name):
    with pytest.raises(FedLDError, match="a site's name has letters"):
        site_name(name)


def scaled(key, factor):
    """A reply in which one entry of the method's message is a multiple of what it was."""

    def spoil(message, reply):
        mine = {name: tree(reply.content, name) for name in ("update", "message")}
        if key in mine["message"]:
            mine["message"][key] = factor * mine["message"][key]
        return Message(pack(unpack(Answer, reply.content), **mine), reply_to=message)

    return spoil


@pytest.mark.parametrize(
    ("settings", "lie", "reason"),
    [
        ({"method": "ridge"}, scaled("moments", 3.0), "of different samples"),
        ({"method": {"name": "ridge", "balanced": True}}, scaled("moments", -1.0), "of different samples"),
        ({"method": "ridge"}, scaled("errors", -1.0), "its errors are negative"),
        ({"method": "lda"}, scaled("targets", 1e6), "samples, and it described"),
        ({"method": "newton"}, scaled("targets", 0.0), "are of 0 samples"),
        ({"method": "regmean"}, scaled("change", 50.0), "more than its update explains"),
    ],
)
def test_sums_that_cannot_be_are_refused_and_the_run_goes_on(grid, digits, tmp_path, settings, lie, reason):
    grid.spoil["beta"] = lie
    excluded = go(grid, digits, tmp_path, train="head", model="cnn", **settings)
    assert reason in excluded.pop("beta")
    assert not any(excluded.values())


@pytest.mark.parametrize("method", ["ridge", "lda"])
def test_told_errors_choose_no_bad_regularisation(grid, digits, tmp_path, method):
    """Errors that are possible, and so not refused, and that leave one candidate only: the largest."""

    def lie(message, reply):
        mine = {name: tree(reply.content, name) for name in ("update", "message")}
        if "errors" in mine["message"]:
            mine["message"]["errors"][:-1] += 1e12
        return Message(pack(unpack(Answer, reply.content), **mine), reply_to=message)

    settings = {"train": "head", "model": "cnn", "method": method, "rounds": 1}
    assert not any(go(grid, digits, tmp_path / "honest", **settings).values())
    grid.spoil["beta"] = lie
    with pytest.warns(UserWarning, match="far from the best"):
        excluded = go(grid, digits, tmp_path / "lied", **settings)
    assert not any(excluded.values())
    honest, lied = (
        read_lines(tmp_path / name / "run", ROUNDS)[-1]["choices"]["lam"] for name in ("honest", "lied")
    )
    assert honest <= lied <= 4 * honest


def test_weights_of_classes_are_the_same_as_on_this_machine(grid, digits, tmp_path):
    settings = {"class_weights": "balanced", "weigh": "sampling", "client_losses": False}
    go(grid, digits, tmp_path, **settings)
    here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
    loop.run(here, tmp_path / "here")
    ours, theirs = (load_file(tmp_path / place / "model.safetensors") for place in ("here", "run"))
    assert all(value.equal(theirs[key]) for key, value in ours.items())
