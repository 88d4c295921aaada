from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.layout import Layout
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server, shares


@dataclass(frozen=True)
class FedDyn(Method):
    """Dynamic regularisation (Algorithm 1 of the paper): local optima are made to agree with the global one.

    Client:  w_i = argmin L_i(w) - <h_i, w> + (alpha/2) |w - w_t|^2;  h_i <- h_i - alpha (w_i - w_t)
    Server:  h <- h - alpha sum_i p_i (w_i - w_t), p over all clients;  w <- mean(w_i) - h / alpha

    So h = sum_i p_i h_i, and at the fixed point, where all w_i agree, h_i is the gradient of L_i and h = 0:
    the optimum of Eq. 1. The paper counts clients alike (`client_weights = "uniform"`). The argmin is as many
    steps of SGD as every method takes.
    """

    alpha: float = 0.01

    sums_suffice: ClassVar[bool] = True

    card: ClassVar[Card] = Card("FedDyn", "Acar et al. 2021")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store h = 0, and the weight of every client in it."""
        h = torch.zeros_like(layout.shared_parameters(weights))
        return Server(weights, {"h": h, "p": shares(sizes, self.client_weights).to(h.dtype)})

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the regularised loss; h_i stays at the client."""
        start = client.weights.clone()
        h = client.state.get("h", torch.zeros_like(start))

        def dynamic(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(weights - start, alpha=self.alpha).sub_(h)

        client.train(self.loss, correction=dynamic)
        return client.reply(state={"h": h - self.alpha * (client.weights - start)})

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step by the aggregate, and back by h / alpha."""
        h = server.extra["h"] - self.alpha * replies.over_all(server.extra["p"], replies.gradients)
        server = replace(server, extra={**server.extra, "h": h})
        return super().step(server, replies, update - h / self.alpha)
