"""Secure rounds over the sites' real ClientApp in this process: methods, and sites lost at every message."""

import json
import os
import pickle
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tests.flower.conftest import Grid

from fedld.aggregation import MatrixSource, column_specs, combine_updates
from fedld.aggregation.sketch import CountSketch
from fedld.config.experiment import make_experiment
from fedld.deployment.keys import make_peer_key
from fedld.engine import loop
from fedld.engine.backends.flower import secure_server
from fedld.engine.backends.flower.engine import FlowerEngine
from fedld.errors import FedLDError
from fedld.privacy.peers import merged_peers, peers_text
from fedld.records.schema import CLIENTS, ROUNDS
from fedld.records.writer import read_lines

FIVE = ("alpha", "beta", "delta", "gamma", "omega")
MEAN = {"rule": {"name": "measured", "rules": "mean", "vote": "mean", "samples": 40}}
HEAD = {"train": "head", "head": "linear"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Five sites of unequal sizes, with a key of each."""
    folder = tmp_path_factory.mktemp("five")
    found, rng = load_digits(), np.random.default_rng(1)
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)
    parts = np.split(rng.permutation(len(images))[:320], [40, 90, 150, 190, 240])
    for name, part in zip((*FIVE, "test"), parts, strict=True):
        classes = np.array(list("0123456789"))
        np.savez(folder / f"{name}.npz", images=images[part], labels=found.target[part], classes=classes)
    for name in FIVE:
        make_peer_key(name, folder)
    keys = merged_peers(folder / f"{name}.peer.toml" for name in FIVE)
    (folder / "peers.toml").write_text(peers_text(keys))
    return folder


class SecureGrid(Grid):
    """Five sites with pinned keys; `lost` ones answer nothing from a message of a secure sum on."""

    def __init__(self, folder, data):
        self.nodes, self.replies, self.spoil, self.lost = {}, {}, {}, {}
        super().__init__(folder, data, ".npz", {})
        self.nodes, self.carried, self.away = {}, [], set()
        for node, site in enumerate(FIVE, start=1):
            self.join(node, site, **{"peer-key": str(data / f"{site}.peer.key"), "images-per-feature": 0.0})
            (folder / "state" / site / "peers.toml").write_text((data / "peers.toml").read_text())

    def _answer(self, message):
        site = self.nodes[message.metadata.dst_node_id].node_config["site"]
        if message.metadata.message_type == "query":
            return super()._answer(message)
        part = json.loads(str(message.content.config_records["part"]["json"]))
        number = part.get("number", 1)
        self.carried.append((site, number))
        if self.gone(site, number, part):
            self.away.add(site)
        return None if site in self.away else super()._answer(message)

    def gone(self, site, number, part):
        """Whether a site stops here."""
        return number >= self.lost.get(site, 9)


@pytest.fixture(autouse=True)
def task(monkeypatch, data):
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setenv("FEDLD_CACHE", str(data / "cache"))


class GramGrid(SecureGrid):
    """`lost` counts the messages of the Gram matrix (2 to 4) and of its sum (5 to 9) after the order (1)."""

    sums = False

    def gone(self, site, number, part):
        request = part.get("request") or {}
        if "jobs" in part:
            self.sums, place = False, 1
        else:
            self.sums = request.get("computation") == "sum" if request else self.sums
            place = number + (4 if self.sums else 1)
        return place >= self.lost.get(site, 99)


def run(folder, data, lost=None, secure="sum", grid=SecureGrid, kill=None, **settings):
    grid = grid(folder, data)
    grid.lost, grid.kill = lost or {}, kill
    out = folder / "run"
    common = {"clients": 5, "rounds": 1, "min_clients": 3, "on_client_failure": "skip", "dry_run": False}
    common |= {"wait_for_clients": 0, "client_losses": False, "dataset": f"npz:{data}/test.npz", "lr": 0.05}
    common |= {"round_timeout": 1.5, "grace": 0.1} | ({"secure": secure} if secure else {})
    loop.run(make_experiment(common | settings), out, engine=FlowerEngine(grid, out))
    return out, grid


def weights(out):
    model = load_file(out / "model.safetensors")
    kept = {name: tensor for name, tensor in model.items() if not name.endswith("num_batches_tracked")}
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(kept.items())])


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fedavg", "model": "resnet8", "dry_run": True},
        {"method": "scaffold", "rounds": 2},
        {"method": "fedld-drift", "rounds": 2, **MEAN},
        {"method": "ridge", **HEAD},
        {"method": "fedavg", "start": "closed", **HEAD},
    ],
    ids=lambda settings: f"{settings['method']}-{settings.get('start', '')}",
)
def test_the_model_is_that_of_the_plain_run(tmp_path, data, settings):
    summed, grid = run(tmp_path / "summed", data, **settings)
    plain, _ = run(tmp_path / "plain", data, secure=None, **settings)
    torch.testing.assert_close(weights(summed), weights(plain), rtol=1e-4, atol=1e-5)
    assert {number for _, number in grid.carried} == {1, 2, 3, 4, 5}
    assert not (summed / "conflict.jsonl").exists()


MOMENTS = [*((number, "before") for number in range(1, 6)), (3, "after"), (5, "after")]


@pytest.mark.parametrize(("number", "when"), MOMENTS)
def test_a_site_killed_at_any_message_does_not_end_the_sum(tmp_path, data, number, when):
    """From message 4 on its vector counts; before, the model is that of the others."""
    out, grid = run(tmp_path / "killed", data, kill=(f"sum {number}", when), grid=KilledGrid)
    assert grid.away == {"omega"}
    (line,) = read_lines(out, ROUNDS)
    assert line["clients"] == (5 if number > 3 else 4)
    if number == 3 and when == "before":
        plain, _ = run(tmp_path / "plain", data, lost={"omega": 1}, secure=None)
        assert (weights(out) - weights(plain)).abs().max() < 2e-6


def test_too_few_survivors_begin_anew_among_themselves(tmp_path, data):
    out, grid = run(tmp_path, data, lost={"omega": 3, "gamma": 3})
    (line,) = read_lines(out, ROUNDS)
    assert line["clients"] == 3
    assert grid.carried.count(("alpha", 1)) == 2  # the order, and the second attempt
    lines = {line["client"]: line for line in read_lines(out, CLIENTS)}
    assert {name for name in lines if "excluded" in lines[name]} == {"omega", "gamma"}


class KilledGrid(SecureGrid):
    """omega handles every message in a process of its own, as sites do; one is killed, and it is away then.

    It is killed `before` it has done anything, or `after` all of it is on disk but for the answer.
    """

    computation = "sum"

    def _answer(self, message):
        site = self.nodes[message.metadata.dst_node_id].node_config["site"]
        if message.metadata.message_type == "query" or site != "omega":
            return super()._answer(message)
        part = json.loads(str(message.content.config_records["part"]["json"]))
        request = part.get("request") or part.get("secure") or {}
        self.computation = request.get("computation", self.computation)
        message_name, moment = self.kill
        kills = message_name == f"{self.computation} {part.get('number', 1)}"
        return None if "omega" in self.away else self._in_a_process(message, moment if kills else "")

    def _in_a_process(self, message, kill):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            if kill == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            reply = super()._answer(message)
            if kill == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            with open(writing, "wb") as pipe:
                pickle.dump(reply, pipe)
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            content = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            self.away.add("omega")
            return None
        return pickle.loads(content)


class LateGrid(SecureGrid):
    """omega is not connected when the orders go out, and delta's first order is lost."""

    introduced = False

    def get_nodes(self):
        nodes = super().get_nodes()
        hidden = self.introduced and not self.carried
        return [
            node for node in nodes if not (hidden and self.nodes[node.node_id].node_config["site"] == "omega")
        ]

    def _answer(self, message):
        reply = super()._answer(message)
        self.introduced = True
        return None if self.carried.count(("delta", 1)) == 1 and self.carried[-1] == ("delta", 1) else reply


@pytest.mark.parametrize("policy", ["skip", "retry"])
def test_sites_that_are_late_or_asked_again_are_in_the_sum(tmp_path, data, policy):
    more = {"wait_for_clients": 30} if policy == "skip" else {}
    settings = {"min_clients": 5, "on_client_failure": policy, **more}
    out, _ = run(tmp_path, data, grid=LateGrid, **settings)
    (line,) = read_lines(out, ROUNDS)
    assert line["clients"] == 5
    whole, _ = run(tmp_path / "whole", data)
    assert (weights(out) - weights(whole)).abs().max() < 1e-6


def test_a_sum_that_lacks_shares_is_never_opened(tmp_path, data):
    with pytest.raises(FedLDError, match=r"'train' was not opened.*only 3 of 5 sites gave their shares"):
        run(tmp_path, data, lost={"omega": 5, "gamma": 5})
    with pytest.raises(FedLDError, match=r"1: 2 usable clients|needs at least 3|sites keep a result"):
        run(tmp_path / "two", data, lost={"omega": 1, "gamma": 1, "delta": 1}, min_clients=2)


PRIVATE = {"dp": "epsilon=8,delta=1e-5,clip=1", "local_steps": 2, "rounds": 2}


@pytest.mark.parametrize("secure", ["sum", "gram"])
def test_sums_and_gram_matrices_of_private_updates(tmp_path, data, secure):
    """Every site adds the whole of its noise; nothing but noisy updates enters the computation."""
    pytest.importorskip("opacus")
    method = {"method": "fedavg" if secure == "sum" else "consensus"}
    out, _ = run(tmp_path, data, secure=secure, **PRIVATE, **method)
    again, _ = run(tmp_path / "again", data, secure=secure, **PRIVATE, **method)
    assert [line["clients"] for line in read_lines(out, ROUNDS)] == [5, 5]
    assert all(line["train_loss"] is None for line in read_lines(out, ROUNDS))
    assert (weights(out) - weights(again)).abs().min() > 0  # the seed does not tell the noise
    for site in FIVE:
        assert len((tmp_path / "state" / site / "privacy.jsonl").read_text().splitlines()) == 2


def test_a_site_with_a_spent_budget_is_left_out_where_enough_others_are_left(tmp_path, data):
    pytest.importorskip("opacus")

    class BoundedGrid(SecureGrid):
        def __init__(self, folder, data):
            super().__init__(folder, data)
            (folder / "state/omega/policy.toml").write_text("epsilon = 6.0\nsmallest_count = 2")
            self.nodes[5].node_config["policy"] = True

    out, _ = run(tmp_path, data, grid=BoundedGrid, **PRIVATE)
    first, second = read_lines(out, ROUNDS)
    assert (first["clients"], second["clients"]) == (5, 4)
    (line,) = [line for line in read_lines(out, CLIENTS) if "excluded" in line]
    assert (line["client"], line["round"]) == ("omega", 2)
    assert "the privacy budget of this site is epsilon 6" in line["excluded"]


def test_an_opened_sum_is_read_again_by_a_resumed_run(tmp_path, data, monkeypatch):
    """A server that stops after the opening: no site would help to open this round twice."""
    whole, _ = run(tmp_path / "whole", data)
    real = secure_server.SecureServer._write

    def stopped(self, *facts):
        real(self, *facts)
        raise KeyboardInterrupt

    monkeypatch.setattr(secure_server.SecureServer, "_write", stopped)
    with pytest.raises(FedLDError, match="stopped after round 0"):
        run(tmp_path / "again", data)
    out, grid = tmp_path / "again" / "run", SecureGrid(tmp_path / "again", data)
    loop.resume(out, engine=FlowerEngine(grid, out), warn=print)
    assert torch.equal(weights(out), weights(whole))
    assert {number for _, number in grid.carried} == {1}


def test_what_cannot_be_summed_is_refused_before_the_run(tmp_path, data):
    with pytest.raises(FedLDError, match="needs single updates"):
        run(tmp_path / "rule", data, rule={"name": "consensus"})
    with pytest.raises(FedLDError, match="a round needs at least 5 clients"):
        run(tmp_path / "four", data, secure="gram", method="consensus", sample_clients=4)
    grid = SecureGrid(tmp_path, data)
    del grid.nodes[5].node_config["peer-key"]
    out = tmp_path / "run"
    settings = {"clients": 5, "min_clients": 3, "dataset": f"npz:{data}/test.npz", "secure": "sum"}
    with pytest.raises(FedLDError, match="start 'omega' with --peers"):
        loop.run(make_experiment(settings), out, engine=FlowerEngine(grid, out))


def same_sketch(monkeypatch, out):
    """Plain runs take the sketches of a secure one."""
    lines = [json.loads(line) for line in (out / "conflict.jsonl").open()]
    sketches = iter([CountSketch(line["sketch"]["buckets"], line["sketch"]["seed"]) for line in lines])

    def sketched(updates, rule, **options):
        matrix = updates.source.matrix  # a sketch takes columns by tensor name, else in their order
        source = MatrixSource(matrix, column_specs((("update", matrix.shape[1]),)))
        return combine_updates(replace(updates, source=source, sketch=next(sketches)), rule, **options)

    monkeypatch.setattr("fedld.methods.base.combine_updates", sketched)


@pytest.mark.parametrize("method", ["consensus", "fedgh"])
def test_rules_of_inner_products_give_the_plain_model_of_the_same_sketch(tmp_path, data, monkeypatch, method):
    settings = {"method": method, "rounds": 2}
    out, grid = run(tmp_path / "gram", data, secure="gram", grid=GramGrid, **settings)
    same_sketch(monkeypatch, out)
    plain, _ = run(tmp_path / "plain", data, secure=None, **settings)
    torch.testing.assert_close(weights(out), weights(plain), rtol=1e-4, atol=1e-5)
    rounds = settings["rounds"]
    assert [grid.carried.count(("alpha", number)) for number in range(1, 6)] == [
        3 * rounds,
        2 * rounds,
        2 * rounds,
        rounds,
        rounds,
    ]


@pytest.mark.parametrize("message", ["gram 3", *(f"sum {number}" for number in range(1, 6))])
def test_a_site_killed_after_it_shared_its_sketch_does_not_end_the_round(
    tmp_path, data, monkeypatch, message
):
    """Before its masked vector has come, the model is that of the others and of their part of the matrix."""
    settings = {"secure": "gram", "grid": KilledGrid, "method": "consensus"}
    out, grid = run(tmp_path / "gram", data, kill=(message, "before"), **settings)
    assert grid.away == {"omega"}
    (line,) = read_lines(out, ROUNDS)
    counts = message in ("sum 4", "sum 5")
    assert line["clients"] == (5 if counts else 4)
    same_sketch(monkeypatch, out)
    missing = {} if counts else {"omega": 1}
    plain, _ = run(tmp_path / "plain", data, missing, secure=None, method="consensus")
    assert (weights(out) - weights(plain)).abs().max() < 2e-6


def test_two_of_five_may_leave_before_the_products_and_four_sites_open_no_matrix(tmp_path, data):
    lost = {"omega": 4, "gamma": 4}
    out, _ = run(tmp_path / "two", data, lost, secure="gram", grid=GramGrid, method="consensus")
    assert read_lines(out, ROUNDS)[0]["clients"] == 3
    with pytest.raises(FedLDError, match="4 sites are left, 5 are needed"):
        run(tmp_path / "early", data, {"omega": 2}, secure="gram", grid=GramGrid, method="consensus")


@pytest.mark.parametrize("lie", ["coefficients", "weights", "matrix"])
def test_sites_refuse_coefficients_that_do_not_follow_from_the_matrix(tmp_path, data, monkeypatch, lie):
    """A server that publishes others, gives false weights, or opens the matrix of other shares."""
    real = secure_server.SecureServer._sum_of_all

    def lying(self, described, sites, published, opening):
        numbers = published.model_dump()
        if lie == "matrix":
            message = json.loads(opening)
            message["products"][0]["products"] = "00" * (len(message["products"][0]["products"]) // 2)
            opening = json.dumps(message).encode() + b"\n"
        else:
            numbers[lie] = [2 * number for number in numbers[lie]]
        return real(self, described, sites, secure_server.PublishedCoefficients(**numbers), opening)

    monkeypatch.setattr(secure_server.SecureServer, "_sum_of_all", lying)
    reason = {"coefficients": "do not follow", "weights": "its own is another", "matrix": "signature"}[lie]
    with pytest.raises(FedLDError, match=f"was not opened.*{reason}"):
        run(tmp_path, data, secure="gram", grid=GramGrid, method="consensus")


class ManySites(SecureGrid):
    """Sites that take part with all five only."""

    def __init__(self, folder, data):
        super().__init__(folder, data)
        for node, site in enumerate(FIVE, start=1):
            policy = 'updates = "gram"\nmin_sites = 5\nsmallest_count = 2'
            (folder / "state" / site / "policy.toml").write_text(policy)
            self.nodes[node].node_config["policy"] = True


def test_an_earlier_sum_does_not_go_on_with_a_later_coefficient(tmp_path, data, monkeypatch):
    """A site refuses a second sum, over four sites, when it has computed its coefficient there already."""
    opened, said, real = [], {}, secure_server.open_gram

    def remembered(*args):
        result = real(*args)
        opened.append(result.opened)
        return result

    def two_sums(self, described, sites, published, opening):
        request, four = self.request(sites, published=published), sites[:4]
        context = described.context(request.attempt, self._keys(sites))
        carrier = secure_server._Carrier(self, context)
        carrier.begin(dict.fromkeys(sites, opening), request)
        counts = np.array([self._weights[site] for site in four])
        rule = secure_server.hidden_updates(self.setup.method, four).coefficients
        c = rule(opened[0].among(range(4)).matrix, counts / counts.sum())
        other = secure_server.PublishedCoefficients(
            coefficients=c.tolist(), weights=[int(count) for count in counts]
        )
        carrier.begin(dict.fromkeys(four, opening), self.request(four, published=other))
        said["second"] = dict(self._problems)
        carrier.ask(2, dict.fromkeys(four, b"keys"))
        said["first"] = dict(self._problems)
        raise FedLDError("no further")

    monkeypatch.setattr(secure_server, "open_gram", remembered)
    monkeypatch.setattr(secure_server.SecureServer, "_sum_of_all", two_sums)
    with pytest.raises(FedLDError, match="no further"):
        run(tmp_path, data, secure="gram", grid=ManySites, method="consensus")
    for site in FIVE[:4]:
        assert "at least 5 sites, not 4" in said["second"][site]
        assert "it is in another secure computation" in said["first"][site]
