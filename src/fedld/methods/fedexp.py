from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class FedExP(Method):
    """Extrapolation: the further apart the clients' updates, the longer the server's step.

    x <- x + eta Delta  with  eta = max(1, sum_i p_i |Delta_i|^2 / (2 (|Delta|^2 + epsilon)))

    The iterates swing around their limit, so the global model is the mean of the last two (Sec. 3.3); clients
    train from the last.
    """

    epsilon: float = 1e-3

    card: ClassVar[Card] = Card("FedExP", "Jhunjhunwala et al. 2023", communication="a model down (iterate)")
    starts_from_global: ClassVar[bool] = False

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """The first iterate."""
        return Server(weights, {"iterate": weights.clone()})

    def broadcast(self, server: Server) -> Tree:
        """Clients start from the last iterate."""
        return {"weights": server.extra["iterate"]}

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """A step of length eta from the last iterate; the global model lies half way."""
        combined = self.aggregate(replies)
        longer = combined.scaled(self.extrapolation(replies, combined.update))
        last, d = server.extra["iterate"], replies.layout.shared
        iterate = self.step(replace(server, weights=last), replies, longer.update).weights
        weights = iterate.clone()
        weights[:d] = (last[:d] + iterate[:d]) / 2
        return Server(weights, {"iterate": iterate}), longer

    def extrapolation(self, replies: Replies, update: Tensor) -> float:
        """eta, the server's step size."""
        squares = replies.gradients.double().square().sum(1)
        length = update.double().square().sum() + self.epsilon
        return max(1.0, (replies.p @ squares / (2 * length)).item())
