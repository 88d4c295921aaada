from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with clients that minimise L_i(w) + (mu/2) |w - w_t|^2."""

    mu: float = 0.01

    card: ClassVar[Card] = Card("FedProx", "Li et al. 2020")
    sums_suffice: ClassVar[bool] = True

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the objective; the proximal term enters as its gradient mu (w - w_t)."""
        anchor = client.weights.clone()

        def proximal(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(weights - anchor, alpha=self.mu)

        client.train(self.loss, correction=proximal)
        return client.reply()
