"""One client with a loss 200 times too large, under every method: what it sends reaches nothing."""

import json

import pytest
import torch

from fedld.config.experiment import make_experiment
from fedld.engine.checkpoint import load_checkpoint
from fedld.engine.loop import run
from fedld.engine.worker import Worker
from fedld.local import LocalClient
from fedld.methods import METHODS
from fedld.methods.fediir import FedIIR
from fedld.methods.fedlin import FedLin

SMALL = {
    "dataset": "fundus-sim",
    "partition": "iid",
    "image_size": 16,
    "data": {"samples": 120},
    "clients": 4,
    "rounds": 2,
    "batch_size": 50,
    "lr": 0.001,
    "momentum": 0.0,
    "client_losses": False,
    "max_update_ratio": 10.0,
    "on_client_failure": "skip",
    "workers": 0,
}
OPTIONS = {"fedma": {"clip": 1e9}}
POISONED = "site_2"


@pytest.fixture
def poison(monkeypatch):
    """Multiply the loss of one client, and the gradients that FedIIR and FedLin prepare from it."""
    train, mean_gradient, full_gradient = LocalClient.train, FedIIR.mean_gradient, FedLin.full_gradient

    def times(client):
        return 200.0 if client.name == POISONED else 1.0

    def trained(client, loss, **options):
        return train(client, lambda context: times(client) * loss(context), **options)

    monkeypatch.setattr(LocalClient, "train", trained)
    monkeypatch.setattr(FedIIR, "mean_gradient", lambda self, c: times(c) * mean_gradient(self, c))
    monkeypatch.setattr(FedLin, "full_gradient", lambda self, c: times(c) * full_gradient(self, c))


@pytest.fixture
def absent(monkeypatch):
    """Let one client fail in every round."""
    load = Worker._client

    def failing(worker, job):
        if job.incoming.client == POISONED:
            raise RuntimeError("away")
        return load(worker, job)

    return lambda: monkeypatch.setattr(Worker, "_client", failing)


def end(name, out):
    """The last checkpoint of a run, its rounds and what was left out of them."""
    model = "cnn" if name in ("fedma", "gamf") else "resnet8"
    method = {"name": name, **OPTIONS.get(name, {})}
    run(make_experiment(SMALL | {"model": model, "method": method}), out)
    checkpoint, _ = load_checkpoint(out / "checkpoints")
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return checkpoint, [line.get("missing", {}) for line in lines]


OTHERS = {"local", "central", *(name for name, method in METHODS.items() if method.second_moments)}
"""No update is combined, there is one client, or sums of features are sent before any training."""


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OTHERS])
def test_a_refused_client_reaches_neither_model_nor_state(tmp_path, poison, absent, name):
    refused, missing = end(name, tmp_path / "poisoned")
    assert missing == [{POISONED: "rejected"}] * 2
    absent()
    without, missing = end(name, tmp_path / "without")
    assert missing == [{POISONED: "failed"}] * 2
    torch.testing.assert_close(refused.server.weights, without.server.weights, rtol=0, atol=0)
    assert refused.server.extra.keys() == without.server.extra.keys()
    for key, value in refused.server.extra.items():
        torch.testing.assert_close(value, without.server.extra[key], rtol=0, atol=0, equal_nan=True)
    assert refused.state_rounds == without.state_rounds
