"""Methods with a momentum that the clients see: FedCM and FedACG."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.fedprox import FedProx


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
        """Store Delta = 0."""
        return Server(weights, {"delta": torch.zeros_like(layout.shared_parameters(weights))})

    def broadcast(self, server: Server) -> Tree:
        """Send the direction of the last round."""
        return {"delta": server.extra["delta"]}

    def client_update(self, client: LocalClient) -> Reply:
        """Train on a mixture of the own gradient and Delta."""
        pull = (1 - self.alpha) * client.message["delta"]

        def momentum(weights: Tensor, gradient: Tensor) -> None:
            gradient.mul_(self.alpha)[: len(pull)].add_(pull)

        client.train(self.loss, correction=momentum)
        return client.reply(message={"rate_sum": torch.tensor(client.rate_sum, dtype=torch.float64)})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step as FedAvg; Delta is the aggregate over the clients' mean K lr."""
        delta = -update / replies.mean("rate_sum").item()
        return super().step(replace(server, extra={"delta": delta}), replies, update)


@dataclass(frozen=True)
class FedACG(FedProx):
    """Accelerated client gradient (Algorithm 1 of the paper): clients start where the momentum leads.

    Client:  from w + lam m, minimise L_i(y) + (mu/2) |y - (w + lam m)|^2
    Server:  m <- lam m + mean(y_i - (w + lam m));  w <- w + m
    """

    lam: float = 0.85
    mu: float = 1e-3

    card: ClassVar[Card] = Card("FedACG", "Kim et al. 2024", communication="a model down (w + lam m)")
    starts_from_global: ClassVar[bool] = False

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store a momentum of zero."""
        return Server(weights, {"m": torch.zeros_like(layout.shared_parameters(weights))})

    def broadcast(self, server: Server) -> Tree:
        """Send the point to start from, ahead of the global model."""
        ahead, m = server.weights.clone(), server.extra["m"]
        ahead[: len(m)] += self.lam * m
        return {"weights": ahead}

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step along the momentum."""
        m = self.lam * server.extra["m"] + update
        return super().step(replace(server, extra={"m": m}), replies, m)
