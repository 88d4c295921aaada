from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class FedCM(Method):
    """Client-level momentum (Algorithm 2 of the paper): every local step leans on the last global direction.

    Client:  y <- y - lr (alpha g + (1 - alpha) Delta)
    Server:  Delta = -(aggregate of the updates) / (K lr), the mean direction of a local step
    """

    alpha: float = 0.1

    card: ClassVar[Card] = Card("FedCM", "Xu et al. 2021", communication="a model down (Delta)")
    needs_linear: ClassVar[str] = "Delta is the mean gradient, read from how far one rate moved the weights"

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Delta = 0."""
        return Server(weights, {"delta": torch.zeros_like(layout.shared_parameters(weights))})

    def broadcast(self, server: Server) -> Tree:
        """The direction of the last round."""
        return {"delta": server.extra["delta"]}

    def client_update(self, client: LocalClient) -> Reply:
        """SGD on a mixture of the own gradient and Delta."""
        pull = (1 - self.alpha) * client.message["delta"]

        def momentum(weights: Tensor, gradient: Tensor) -> None:
            gradient.mul_(self.alpha)[: len(pull)].add_(pull)

        client.train(self.loss, correction=momentum)
        return client.reply(message={"rate_sum": torch.tensor(client.rate_sum, dtype=torch.float64)})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """FedAvg's step; Delta is the aggregate over the clients' mean K lr."""
        delta = -update / replies.mean("rate_sum").item()
        return super().step(replace(server, extra={"delta": delta}), replies, update)
