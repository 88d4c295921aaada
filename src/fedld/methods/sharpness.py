"""Methods that train towards flat minima: FedSAM and FedSpeed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server, shares

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
        """Train with the gradient at the perturbed point."""

        def sharpened(weights: Tensor, gradient: Tensor) -> None:
            client.gradient_at(self.rho * gradient / (gradient.norm() + TINY))

        client.train(self.loss, correction=sharpened)
        return client.reply()


@dataclass(frozen=True)
class FedSpeed(Method):
    """Prox-correction and a gradient at a perturbed point (Algorithm 1 of the paper).

    Client:  g1 at w, g2 at w + rho g1 / |g1|
             w <- w - lr ((1 - alpha) g1 + alpha g2 - g_i + (w - w_t) / lam)
             g_i <- g_i - (w_i - w_t) / lam
    Server:  h <- h + sum_i p_i (w_i - w_t), p over all clients;  w <- mean(w_i) + h

    So h = -lam sum_i p_i g_i over all clients, as in the released code. Where all of them take part in every
    round this is Algorithm 1's mean of w_i - lam g_i; with a sample of them Algorithm 1 has no fixed point.
    """

    lam: float = 10.0
    alpha: float = 1.0
    rho: float = 0.1

    card: ClassVar[Card] = Card("FedSpeed", "Sun et al. 2023")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store h = 0, and the weight of every client in it."""
        h = torch.zeros_like(layout.shared_parameters(weights))
        return Server(weights, {"h": h, "p": shares(sizes, self.client_weights).to(h.dtype)})

    def client_update(self, client: LocalClient) -> Reply:
        """Train on both gradients with the proximal term and its correction; g_i stays at the client."""
        start = client.weights.clone()
        correction = client.state.get("g", torch.zeros_like(start))

        def corrected(weights: Tensor, gradient: Tensor) -> None:
            first = gradient.clone()
            client.gradient_at(self.rho * first / (first.norm() + TINY))
            gradient.mul_(self.alpha).add_(first, alpha=1 - self.alpha)
            gradient.sub_(correction).add_(weights - start, alpha=1 / self.lam)

        client.train(self.loss, correction=corrected)
        return client.reply(state={"g": correction - (client.weights - start) / self.lam})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Add to the aggregate what the corrections of all clients amount to."""
        h = server.extra["h"] + server.extra["p"][replies.rows] @ replies.gradients
        server = replace(server, extra={**server.extra, "h": h})
        return super().step(server, replies, update + h)
