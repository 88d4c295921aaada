"""Every method through the real engine on fundus-sim."""

import json
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from fedld.cli.methods import describe, methods
from fedld.config.experiment import make_experiment
from fedld.engine.client_data import StateStore
from fedld.engine.loop import run
from fedld.engine.setup import prepare, sample
from fedld.errors import FedLDError
from fedld.methods import METHODS, Card, Method

SMALL = {
    "dataset": "fundus-sim",
    "partition": "iid",
    "image_size": 16,
    "data": {"samples": 360},
    "rounds": 2,
    "batch_size": 20,
    "client_losses": False,
    "workers": 0,
}
TWENTY = {"clients": 20, "sample_rate": 0.25}


def lines(folder, name="rounds.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("setting", [{}, TWENTY], ids=["five", "twenty"])
@pytest.mark.parametrize("name", METHODS)
def test_trains_with_all_clients_and_with_a_sample(tmp_path, name, setting):
    frozen = {"train": "head"} if METHODS[name].second_moments else {}
    experiment = make_experiment(SMALL | setting | frozen | {"method": name})
    start = prepare(experiment, tmp_path / "states")[1].weights
    summary = run(experiment, tmp_path / "run")
    method, rounds = METHODS[name], lines(tmp_path / "run")
    assert len(rounds) == 2
    for line in rounds:
        assert ("test" in line) == method.has_global
        assert ("personal" in line) == method.personalised
        assert math.isfinite(line["train_loss"])
        assert line["clients"] == (1 if name == "central" else 5)
    assert ("test" in summary) == method.has_global
    assert start.isfinite().all()
    if name != "local":
        assert rounds[0 if name in ("ridge", "lda") else -1]["update_norm"] > 0  # those are done in round 1
        assert summary["bytes_up"] >= 4 * summary["trained_parameters"] * rounds[0]["clients"]


@dataclass(frozen=True)
class Counting(Method):
    """Counts in its state how often a client has trained, and reports what it found."""

    card: ClassVar[Card] = Card("Counting", "test")

    def client_update(self, client):
        seen = client.state.get("seen", torch.zeros(()))
        client.train(self.loss)
        reply = client.reply(state={"seen": seen + 1})
        return replace(reply, metrics={**reply.metrics, "seen": float(seen)})


def test_client_state_survives_rounds_without_the_client(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "counting", Counting())
    experiment = make_experiment(SMALL | {"method": "counting", "sample_clients": 2, "rounds": 8})
    run(experiment, tmp_path / "run")
    gaps, last, times = 0, {}, {}
    for line in lines(tmp_path / "run", "clients.jsonl"):
        client = line["client"]
        assert line["metrics"]["seen"] == times.get(client, 0)
        gaps += client in last and line["round"] > last[client] + 1
        last[client], times[client] = line["round"], times.get(client, 0) + 1
    assert gaps >= 3, "clients must have come back after a pause"


@pytest.mark.parametrize("name", ["fedpac", "fedbn", "fedsr"])
def test_the_decomposition_sees_the_private_parts_that_were_trained(tmp_path, name):
    """L_i(w_i) measured after the round is what the client itself measured at the end of its training."""
    settings = SMALL | {"method": name, "model": "resnet8", "decompose": 1}
    for losses in (True, False):
        run(make_experiment(settings | {"client_losses": losses}), tmp_path / str(losses))
    told, measured = (lines(tmp_path / str(losses), "cross_loss.jsonl") for losses in (True, False))
    for one, other in zip(told, measured, strict=True):
        for i in range(5):
            assert one["cross_loss"][i][i] == pytest.approx(other["cross_loss"][i][i], rel=1e-4)


def test_local_keeps_everything_and_sends_nothing(tmp_path):
    summary = run(make_experiment(SMALL | {"method": "local"}), tmp_path / "run")
    assert summary["bytes_up"] == summary["bytes_down"] == 0
    assert "test" not in summary
    assert 0 <= summary["personal"]["final"]["accuracy"] <= 1


def test_central_trains_on_everybodys_samples(tmp_path):
    experiment = make_experiment(SMALL | {"method": "central", "sample_clients": 3})
    pooled = prepare(experiment, tmp_path)[0].federation
    dealt = prepare(make_experiment(SMALL), tmp_path)[0].federation
    assert len(pooled.clients) == 1
    assert len(pooled.clients[0].train) == sum(len(client.train) for client in dealt.clients)
    assert sample(experiment, ["pooled"], 1) == ["pooled"]


@pytest.mark.parametrize("name", ["fedma", "gamf"])
def test_matching_methods_refuse_residual_networks_before_anything_runs(tmp_path, name):
    with pytest.raises(FedLDError, match="cannot match ResNet"):
        run(make_experiment(SMALL | {"method": name, "model": "resnet8"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_fedbn_on_batchnorm_measures_personal_and_global_models_apart(tmp_path):
    summary = run(make_experiment(SMALL | {"method": "fedbn", "model": "resnet8"}), tmp_path / "run")
    assert summary["test"]["final"]["accuracy"] is not None
    assert summary["personal"]["final"]["accuracy"] is not None
    assert summary["bytes_up"] > summary["bytes_down"]  # BatchNorm goes up, and does not come back


@dataclass(frozen=True)
class Asked(Method):
    """Remembers for whom it was asked to make a message."""

    card: ClassVar[Card] = Card("Asked", "test")
    personalised: ClassVar[bool] = True
    rows: ClassVar[list] = []

    def personal(self, server, row):
        self.rows.append(row)
        return {}


@pytest.mark.parametrize(("eval_every", "expected"), [(1, 2 + 4 + 4), (2, 2 + 2 + 4)])
def test_a_method_is_asked_once_for_training_and_evaluation(tmp_path, monkeypatch, eval_every, expected):
    """Two clients train in each of two rounds, and all four are evaluated where that is due."""
    monkeypatch.setitem(METHODS, "asked", Asked())
    Asked.rows.clear()
    settings = {"method": "asked", "clients": 4, "sample_clients": 2, "eval_every": eval_every}
    run(make_experiment(SMALL | settings), tmp_path / "run")
    assert len(Asked.rows) == expected


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedpac"])
def test_with_local_statistics_the_global_model_has_their_mean(tmp_path, name):
    """Not the initial ones, with which no trained network can predict."""
    experiment = make_experiment(
        SMALL | {"method": name, "model": "resnet8", "buffers": "local", "rounds": 1}
    )
    setup, _ = prepare(experiment, tmp_path / "run/states")
    summary = run(experiment, tmp_path / "run")
    sizes = torch.tensor(list(setup.sizes.values()), dtype=torch.float64)
    states = [StateStore(setup.states).load(name, 1)["private"] for name in setup.sizes]
    own = torch.stack(states)[:, setup.layout.trainable - setup.layout.shared :]
    model = load_file(tmp_path / "run/model.safetensors")
    for entry in setup.layout.entries:
        if entry.kind != "parameter":
            start = entry.start - setup.layout.shared_end
            values = own[:, start : start + entry.size].double()
            mean = values.amax(0) if entry.kind == "counter" else sizes / sizes.sum() @ values
            torch.testing.assert_close(model[entry.name].double().flatten(), mean, rtol=1e-5, atol=1e-6)
    assert summary["test"]["final"]["accuracy"] is not None
    assert summary["personal"]["final"]["accuracy"] is not None


@pytest.mark.parametrize("name", ["local", "pfedla"])
def test_without_a_global_model_there_is_no_global_loss(tmp_path, name):
    """Neither the untrained model's nor whatever `client_losses` happens to measure."""
    settings = SMALL | {"method": name, "decompose": 1}
    for losses in (True, False):
        run(make_experiment(settings | {"client_losses": losses}), tmp_path / str(losses))
    told, measured = (lines(tmp_path / str(losses)) for losses in (True, False))
    for one, other in zip(told, measured, strict=True):
        assert one["global_loss"] is other["global_loss"] is None
        assert one["aggregation_loss"] is other["aggregation_loss"] is None
        for term in ("local_loss", "shift_loss"):
            assert one[term] == pytest.approx(other[term], rel=1e-4)


@pytest.mark.parametrize("name", ["fedpac", "scaffold", "pfedla", "fedsr"])
def test_batchnorm_networks_with_local_statistics(tmp_path, name):
    settings = {"method": name, "model": "resnet8", "buffers": "local", **TWENTY, "sample_rate": 0.2}
    assert run(make_experiment(SMALL | settings), tmp_path / "run")["rounds"] == 2


def test_the_table_of_methods(capsys):
    methods(json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    named = (
        "fedavg fedprox fedbn fedpac fedgh scaffold fedcm fediir fedsr fedma gamf pfedla robfedavg pgrad "
        "fednova fedavgm fedadam fedyogi fedld fedld-official fedld-tensor fedld-smooth fedld-drop local "
        "central"
    )
    assert set(named.split()) <= set(rows)
    assert rows["fedbn"]["personal"] == "BatchNorm"
    assert not rows["fedma"]["batchnorm"]
    assert rows["fedprox"]["options"]["mu"] == 0.01
    assert rows["pgrad"]["rule"] == {"name": "pgrad"}
    methods()
    text = capsys.readouterr().out
    assert all(name in text for name in METHODS)
    assert describe("fedld", METHODS["fedld"])["objective"] == "marg-log"
