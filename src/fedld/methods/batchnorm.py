"""Methods that keep parts of BatchNorm with the clients."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server
from fedld.models import batchnorm_names


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg in which every BatchNorm module (found by type) stays with its client.

    A client trains and predicts with its own BatchNorm, kept also while it is not sampled. A copy of those
    numbers goes to the server: their mean (of counters the maximum) completes the global model and is what a
    client starts from that has none yet. On a network without BatchNorm it is FedAvg.
    """

    card: ClassVar[Card] = Card(
        "FedBN", "Li et al. 2021", personal="BatchNorm", communication="none, BatchNorm only up"
    )
    personalised: ClassVar[bool] = True

    def private(self, model: nn.Module) -> frozenset[str]:
        """Scale, shift and statistics of every BatchNorm."""
        return frozenset(batchnorm_names(model))

    def client_update(self, client: LocalClient) -> Reply:
        """Train as FedAvg, and send a copy of the client's BatchNorm."""
        client.train(self.loss)
        parameters = client.layout.private_parameters(client.weights).clone()
        return client.reply(message={"batchnorm": parameters} if len(parameters) else {})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step as FedAvg on the rest; the global model has the mean BatchNorm of this round's clients."""
        server = super().step(server, replies, update)
        if "batchnorm" in replies.messages[0]:
            replies.layout.private_parameters(server.weights).copy_(replies.mean("batchnorm"))
        return server


@dataclass(frozen=True)
class SiloBN(FedBN):
    """FedBN for the statistics alone: BatchNorm's means and variances stay with their client.

    Its scales and shifts are averaged like everything else.
    """

    card: ClassVar[Card] = Card(
        "SiloBN",
        "Andreux et al. 2020",
        personal="BatchNorm statistics",
        communication="none, statistics only up",
    )

    def private(self, model: nn.Module) -> frozenset[str]:
        """Name the statistics of every BatchNorm."""
        return super().private(model) - {name for name, _ in model.named_parameters()}
