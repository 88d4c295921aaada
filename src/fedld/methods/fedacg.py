from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout, Tree
from fedld.methods.base import Card, Replies, Server
from fedld.methods.fedprox import FedProx


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
        """No momentum."""
        return Server(weights, {"m": torch.zeros_like(layout.shared_parameters(weights))})

    def broadcast(self, server: Server) -> Tree:
        """The point to start from, ahead of the global model."""
        ahead, m = server.weights.clone(), server.extra["m"]
        ahead[: len(m)] += self.lam * m
        return {"weights": ahead}

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Along the momentum."""
        m = self.lam * server.extra["m"] + update
        return super().step(replace(server, extra={"m": m}), replies, m)
