"""A transform that shows the server sums alone: the same model, records without single updates, refusals."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

import fedld
from fedld.errors import FedLDError
from fedld.transforms import Total, UpdateTransform

SMALL = {"federation": "digits", "clients": 4, "rounds": 3, "workers": 0, "lr": 0.05}


@dataclass(frozen=True)
class PlainSum(UpdateTransform):
    """Add updates up without hiding them on the way: what a secure sum gives, in the clear."""

    name = "plain-sum"
    sums_only = True
    without: str = ""

    def total(self, messages, weights, entries):
        clients = tuple(client for client in messages if client != self.without)
        sums = {
            key: sum(
                (weights[client] if entries[key].weighted else 1) * messages[client][key].double()
                for client in clients
            )
            for key in messages[clients[0]]
        }
        return Total(clients=clients, weight=sum(weights[client] for client in clients), sums=sums)


def weights(result):
    return load_file(result.path / "model.safetensors")


@pytest.mark.parametrize("method", ["fedavg", "fedavgm"])
def test_the_model_is_that_of_single_updates(tmp_path, method):
    settings = {**SMALL, "model": "resnet8", "rounds": 1}  # more rounds of BatchNorm magnify rounding
    plain = fedld.run(method, out=tmp_path / "plain", **settings)
    summed = fedld.run(method, out=tmp_path / "sum", transform=PlainSum(), **settings)
    for key, value in weights(plain).items():
        if key.endswith("num_batches_tracked"):  # the largest of the clients', of which a sum tells nothing
            continue
        torch.testing.assert_close(weights(summed)[key], value, rtol=1e-3, atol=1e-4)
    assert summed.rounds[-1]["train_loss"] == pytest.approx(plain.rounds[-1]["train_loss"], rel=1e-4)


def test_what_cannot_be_known_is_said_and_not_recorded(tmp_path):
    result = fedld.run("fedprox", out=tmp_path / "run", transform=PlainSum(), **SMALL)
    assert not (tmp_path / "run/conflict.jsonl").exists()
    for line in result.clients:
        assert "update_norm" not in line
        assert "excluded" not in line
    assert "hidden_updates" in [finding.check for finding in result.diagnosis.findings]
    result.report(tmp_path / "page.html")
    assert "sums of updates alone" in (tmp_path / "page.html").read_text()


def test_a_client_that_is_not_in_the_sum_is_missing(tmp_path):
    result = fedld.run("fedavg", out=tmp_path / "run", transform=PlainSum(without="client_2"), **SMALL)
    assert [line["missing"] for line in result.rounds] == [{"client_2": "rejected"}] * 3


@pytest.mark.parametrize(
    ("method", "settings", "reason"),
    [
        ("fednova", {}, "method 'fednova' needs single updates or messages"),
        ("fedavg", {"rule": "median"}, "rule 'median' needs single updates"),
        ("fedavg", {"decompose": 1}, "the loss decomposition needs single models"),
        ("fedavg", {"max_update_ratio": 10.0}, "max_update_ratio compares single updates"),
    ],
)
def test_what_needs_single_updates_is_refused_before_the_run(tmp_path, method, settings, reason):
    with pytest.raises(FedLDError, match=f"transform 'plain-sum' shows the server sums alone: {reason}"):
        fedld.run(method, out=tmp_path / "run", transform=PlainSum(), **SMALL, **settings)
    assert not (tmp_path / "run").exists()
