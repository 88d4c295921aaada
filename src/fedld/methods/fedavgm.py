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
        """No velocity."""
        return Server(weights, {"velocity": torch.zeros_like(layout.shared_parameters(weights))})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step along the velocity."""
        velocity = self.beta * server.extra["velocity"] + update
        return super().step(replace(server, extra={"velocity": velocity}), replies, self.eta * velocity)
