from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method

TINY = 1e-12  # a gradient of zero has no direction


@dataclass(frozen=True)
class FedSAM(Method):
    """Sharpness-aware clients: a step uses the gradient at w + rho g / |g|, where the loss nearby is worst.

    It costs a second gradient for every step.
    """

    rho: float = 0.05

    card: ClassVar[Card] = Card("FedSAM", "Qu et al. 2022")
    sums_suffice: ClassVar[bool] = True

    def client_update(self, client: LocalClient) -> Reply:
        """SGD with the gradient at the perturbed point."""

        def sharpened(weights: Tensor, gradient: Tensor) -> None:
            client.gradient_at(self.rho * gradient / (gradient.norm() + TINY))

        client.train(self.loss, correction=sharpened)
        return client.reply()
