"""Own data, network, loss, measure and method, passed as values. Run it: python examples/own_parts.py"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fedld
from fedld.methods import Card


class Net(nn.Module):
    """An own network: two layers on eight numbers."""

    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, x):
        return self.layers(x)


def smoothed(logits, labels):
    """An objective is a function of (logits, labels)."""
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def top2(logits, labels):
    """A metric gives one value per sample, or is a fedld.Metric of sums."""
    return (logits.topk(2).indices == labels[:, None]).any(1).float()


@dataclass(frozen=True)
class Careful(fedld.Method):
    """A method is a frozen dataclass: here FedAvg whose server takes a part of the step."""

    part: float = 0.8
    card: ClassVar[Card] = Card("Careful", "this example")

    def step(self, server, replies, update):
        return super().step(server, replies, self.part * update)


def hospital(seed, shift):
    """Arrays of one hospital: labels 0, 1, 2 and eight noisy numbers that depend on them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 120)
    return rng.normal(size=(120, 8)).astype(np.float32) + np.eye(3, 8)[labels] * 2 + shift, labels


def sites():
    clients = {"paris": hospital(1, 0.0), "lyon": hospital(2, 0.5), "nice": hospital(3, -0.5)}
    return fedld.Federation.from_arrays(clients, test=hospital(4, 0.0), name="hospitals")


if __name__ == "__main__":
    parts = {"model": Net, "objective": smoothed, "metrics": [top2], "rounds": 6, "lr": 0.2, "decompose": 3}
    result = fedld.run(Careful(part=0.5), sites(), **parts)
    print(result, result.rounds[-1]["test"], result.decomposition[-1], sep="\n")
    print(result.model(torch.zeros(1, 8)))
    study = fedld.compare(["fedavg", Careful()], sites(), seeds=range(2), **parts)
    print(*study.table, study.verdict, sep="\n")
