"""Orders and replies without processes: what a site refuses from a server, and a server from a site."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from fedld import __version__
from fedld.data import load
from fedld.engine import loop
from fedld.engine.checkpoint import load_checkpoint
from fedld.engine.experiment import make_experiment
from fedld.engine.flower import backend as backend_module
from fedld.engine.flower import site as site_module
from fedld.engine.flower.server import FlowerEngine
from fedld.engine.flower.simulation import export, virtual_sites
from fedld.engine.flower.sites import Sites
from fedld.engine.flower.wire import Answer, Order, Question, pack, tree, unpack
from fedld.engine.records import read_lines
from fedld.errors import FedLDError
from fedld.methods import METHODS

SITES = ("alpha", "beta", "gamma")


class Grid:
    """Flower's grid with the sites' real ClientApp behind it, in this process."""

    def __init__(self, folder, data):
        self.nodes, self.replies, self.spoil = {}, {}, {}
        self.folder, self.data, self.registered = folder, data, {}
        self.app = site_module.app
        for node, site in enumerate(SITES, start=1):
            self.join(node, site)

    def join(self, node, site, data=None, name=None):
        path = str(data or self.data / f"{site}.npz")
        config = {"site": site, "data": path, "state": str(self.folder / "state")}
        self.nodes[node] = Context(0, node, config, RecordDict(), {})
        self.registered[node] = name or ""

    def get_nodes(self):
        return [SimpleNamespace(node_id=n, status="online", name=self.registered[n]) for n in self.nodes]

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            ids.append(f"m{len(self.replies)}.{message.metadata.dst_node_id}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.replies[ids[-1]] = self._answer(message)
        return ids

    def _answer(self, message):
        context = self.nodes[message.metadata.dst_node_id]
        reply = self.app(message, context)
        spoil = self.spoil.get(context.node_config["site"])
        if spoil is not None and message.metadata.message_type == "train":
            reply = spoil(message, reply)
        return reply

    def pull_messages(self, ids):
        found = [self.replies[i] for i in ids if self.replies.get(i) is not None]
        for reply in found:
            self.replies[reply.metadata.reply_to_message_id] = None
        return found


@pytest.fixture(autouse=True)
def task(monkeypatch, tmp_path, digits):
    """Flower lets messages be made inside its tasks only."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(backend_module, "DEFAULT_TIMEOUT", 1.5)
    monkeypatch.setenv("FEDLD_CACHE", str(digits / "cache"))


@pytest.fixture
def grid(tmp_path, digits):
    return Grid(tmp_path, digits)


def experiment(digits, **settings):
    common = {"clients": 3, "rounds": 1, "min_clients": 2, "on_client_failure": "skip", "wait_for_clients": 0}
    return make_experiment(common | {"dataset": f"npz:{digits}/test.npz"} | settings)


def go(grid, digits, tmp_path, **settings):
    out = tmp_path / "run"
    loop.run(experiment(digits, **settings), out, engine=FlowerEngine(grid, out))
    return {line["client"]: line.get("excluded") for line in read_lines(out / "clients.jsonl")}


def changed(update=None, part=None, **trees):
    """A reply with another update, other words or further trees."""

    def spoil(message, reply):
        answer = unpack(Answer, reply.content)
        mine = {name: tree(reply.content, name) for name in ("update", "message")} | trees
        if update is not None:
            mine["update"] = {"update": update(mine["update"]["update"])}
        return Message(pack(part(answer) if part else answer, **mine), reply_to=message)

    return spoil


def silent(message, reply):
    return None


def malformed(message, reply):
    content = pack(Answer())
    content.config_records["part"]["json"] = '{"outcomes": [{"metrics": {"steps": "many"}}], "extra": 1}'
    return Message(content, reply_to=message)


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
        changed(part=lambda a: Answer(outcomes=[a.outcomes[0].model_copy(update={"metrics": {}})])),
        "lack 'steps'",
    ),
    "too few": (changed(part=lambda a: Answer()), "answered 0 of 1"),
    "error": (changed(part=lambda a: Answer(error="the disk is full")), "the disk is full"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_by_name_and_the_run_goes_on(grid, digits, tmp_path, kind):
    grid.spoil["beta"], reason = BAD[kind]
    excluded = go(grid, digits, tmp_path)
    assert reason in excluded["beta"]
    assert excluded["alpha"] is None
    assert excluded["gamma"] is None


def test_below_quorum_nothing_is_aggregated(grid, digits, tmp_path):
    grid.spoil |= {"alpha": silent, "beta": BAD["error"][0]}
    with pytest.raises(
        FedLDError, match=r"round 1: 1 usable clients, at least 2 .*alpha: no reply.*disk is full"
    ):
        go(grid, digits, tmp_path)
    assert not (tmp_path / "run" / "clients.jsonl").exists()


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"central"}))
def test_every_method_is_the_same_as_on_this_machine(grid, digits, tmp_path, method):
    settings = {"method": method, "rounds": 2, "model": "resnet8" if method == "fedbn" else "cnn"}
    go(grid, digits, tmp_path, **settings)
    here = experiment(digits, **settings, dataset=f"npz:{digits}/all.npz", workers=0)
    loop.run(here, tmp_path / "here")
    ours, theirs = (load_checkpoint(tmp_path / place / "checkpoints")[0] for place in ("here", "run"))
    assert ours.server.weights.equal(theirs.server.weights)
    assert all(value.equal(theirs.server.extra[key]) for key, value in ours.server.extra.items())
    line = read_lines(tmp_path / "run" / "rounds.jsonl")[-1]
    if METHODS[method].personalised:
        assert 0 <= line["personal_own_accuracy"] <= 1
        assert "personal_accuracy" not in line


def test_what_is_private_is_not_sent(grid, digits, tmp_path):
    seen = []
    grid.spoil["alpha"] = lambda message, reply: seen.append(reply.content) or reply
    go(grid, digits, tmp_path, method="fedbn", model="resnet8")
    (state,) = (tmp_path / "state" / "alpha").glob("*/states/*")
    private = load_file(state)["private"]
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


def test_a_site_may_lack_a_class(grid, digits, tmp_path):
    with np.load(digits / "beta.npz") as found:
        few = found["labels"] < 7
        arrays = {key: found[key][few] for key in ("images", "labels", "split")}
    np.savez(tmp_path / "few.npz", **arrays)
    grid.join(2, "beta", data=tmp_path / "few.npz")
    go(grid, digits, tmp_path)
    assert read_lines(tmp_path / "run" / "clients.jsonl")[1]["label_counts"][7:] == [0, 0, 0]


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


def order(**changes):
    facts = {"version": __version__, "run": "0" * 32, "site": 0, "settings": 'method = "fedavg"', "tasks": []}
    return {**facts, "classes": ["a"], "mean": [0.0], "std": [1.0], "kept": [], **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": "../../etc"}, "malformed"),
        ({"site": 10**9}, "malformed"),
        ({"path": "/etc"}, "malformed"),
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


def test_a_missing_site_leaves_measures_unknown(grid, digits, tmp_path):
    grid.spoil["beta"] = silent
    go(grid, digits, tmp_path, decompose=1)
    line = read_lines(tmp_path / "run" / "rounds.jsonl")[0]
    assert line["global_loss"] is None
    assert line["accuracy"] is not None


def test_a_dataset_becomes_sites_of_a_simulation(grid, digits, tmp_path):
    """Flower's simulation tells a node only its number; the rest is as at a real site."""
    settings = {"dataset": "digits", "clients": 3, "rounds": 1, "workers": 0}
    loop.run(make_experiment(settings), tmp_path / "here")
    export(load(make_experiment(settings).data_spec()), tmp_path / "sites")
    names = ["client_1", "client_2", "client_3"]
    nodes = {
        k: {"site": name, "data": f"{tmp_path}/sites/{name}.npz", "state": f"{tmp_path}/state"}
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
