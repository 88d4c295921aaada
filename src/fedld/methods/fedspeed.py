from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method
from fedld.methods.fedsam import TINY


@dataclass(frozen=True)
class FedSpeed(Method):
    """Prox-correction and a gradient at a perturbed point (Algorithm 1 of the paper).

    Client:  g1 at w, g2 at w + rho g1 / |g1|
             w <- w - lr ((1 - alpha) g1 + alpha g2 - g_i + (w - w_t) / lam)
             g_i <- g_i - (w_i - w_t) / lam;  sends w_i - lam g_i
    Server:  the mean of what was sent
    """

    lam: float = 10.0
    alpha: float = 1.0
    rho: float = 0.1

    card: ClassVar[Card] = Card("FedSpeed", "Sun et al. 2023")

    def client_update(self, client: LocalClient) -> Reply:
        """SGD on both gradients with the proximal term and its correction; g_i stays here."""
        start = client.weights.clone()
        correction = client.state.get("g", torch.zeros_like(start))

        def corrected(weights: Tensor, gradient: Tensor) -> None:
            first = gradient.clone()
            client.gradient_at(self.rho * first / (first.norm() + TINY))
            gradient.mul_(self.alpha).add_(first, alpha=1 - self.alpha)
            gradient.sub_(correction).add_(weights - start, alpha=1 / self.lam)

        client.train(self.loss, correction=corrected)
        correction = correction - (client.weights - start) / self.lam
        shared = client.layout.shared
        client.weights[:shared] -= self.lam * correction[:shared]
        return client.reply(state={"g": correction})
