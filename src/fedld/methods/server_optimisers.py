"""Methods with an optimiser's step of the server along the average update."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class FedAvgM(Method):
    """FedAvg with momentum on the server: v <- beta v + aggregate, w <- w + eta v.

    A lasting direction is followed at eta / (1 - beta) times the clients' pace, three times by default; the
    paper's eta = 1 makes it ten times and wants a smaller learning rate on the clients.
    """

    beta: float = 0.9
    eta: float = 0.3

    card: ClassVar[Card] = Card("FedAvgM", "Hsu et al. 2019")
    sums_suffice: ClassVar[bool] = True

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store a velocity of zero."""
        return Server(weights, {"velocity": torch.zeros_like(layout.shared_parameters(weights))})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step along the velocity."""
        velocity = self.beta * server.extra["velocity"] + update
        return super().step(replace(server, extra={"velocity": velocity}), replies, self.eta * velocity)


@dataclass(frozen=True)
class FedAdam(Method):
    """Adam on the server, the aggregate Delta in place of a gradient (Algorithm 2 of the paper).

    m <- beta1 m + (1 - beta1) Delta,  v <- beta2 v + (1 - beta2) Delta^2,  w <- w + eta m / (sqrt(v) + tau)
    """

    eta: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    card: ClassVar[Card] = Card("FedAdam", "Reddi et al. 2021")
    sums_suffice: ClassVar[bool] = True

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store m = 0, v = tau^2, the least the paper allows."""
        m = torch.zeros_like(layout.shared_parameters(weights))
        return Server(weights, {"m": m, "v": torch.full_like(m, self.tau**2)})

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Update the exponential mean of the squares."""
        return self.beta2 * v + (1 - self.beta2) * square

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step along the scaled first moment."""
        m = self.beta1 * server.extra["m"] + (1 - self.beta1) * update
        v = self.second_moment(server.extra["v"], update.square())
        scaled = self.eta * m / (v.sqrt() + self.tau)
        return super().step(replace(server, extra={"m": m, "v": v}), replies, scaled)


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam with a second moment that moves additively: v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    card: ClassVar[Card] = Card("FedYogi", "Reddi et al. 2021")

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Step by a fixed size towards the square, however far it is."""
        return v - (1 - self.beta2) * square * (v - square).sign()
