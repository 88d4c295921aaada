from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout
from fedld.methods.base import Card, Method, Replies, Server


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
        """m = 0, v = tau^2, the least the paper allows."""
        m = torch.zeros_like(layout.shared_parameters(weights))
        return Server(weights, {"m": m, "v": torch.full_like(m, self.tau**2)})

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Exponential mean of the squares."""
        return self.beta2 * v + (1 - self.beta2) * square

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step along the scaled first moment."""
        m = self.beta1 * server.extra["m"] + (1 - self.beta1) * update
        v = self.second_moment(server.extra["v"], update.square())
        scaled = self.eta * m / (v.sqrt() + self.tau)
        return super().step(replace(server, extra={"m": m, "v": v}), replies, scaled)
