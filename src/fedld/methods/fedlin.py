from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Messages, MessageSum, Method, Replies, Server
from fedld.methods.features import BATCH


@dataclass(frozen=True)
class FedLin(Method):
    """Drift corrected by gradients at the round's incoming model (Mitra et al. 2021).

    First:   every client sends g_i = grad L_i(x) over all of its samples; the server averages them to g
    Client:  y <- y - lr (grad l(y) - g_i + g)
    Server:  x <- mean(y)

    SCAFFOLD's control variates are mean gradients along the clients' last paths; g_i and g belong to the
    model from which this round starts, so the corrections of all clients add up to zero at any time. The
    price is one more exchange and two more passes over the samples in every round.
    """

    sums_suffice: ClassVar[bool] = True
    message_sums: ClassVar[Mapping[str, MessageSum]] = {"gradient": MessageSum(2.0**20)}

    card: ClassVar[Card] = Card("FedLin", "Mitra et al. 2021", communication="a model each way (g)")

    def broadcast(self, server: Server) -> Tree:
        """Send the mean gradient of the round."""
        return server.extra

    @property
    def prepares(self) -> bool:
        """Gradients come before training."""
        return True

    def prepare(self, client: LocalClient) -> Tree:
        """Compute the gradient of the client's loss at the incoming model."""
        return {"gradient": self.full_gradient(client)}

    def prepared_lengths(self, message: Tree) -> dict[str, float]:
        """Measure the length of the gradient."""
        return {"gradient": float(torch.linalg.vector_norm(message["gradient"], dtype=torch.float64))}

    def gather(self, server: Server, messages: Messages) -> Server:
        """Average the clients' gradients."""
        return replace(server, extra={"g": messages.mean("gradient")})

    def client_update(self, client: LocalClient) -> Reply:
        """Train with the correction g - g_i."""
        shift = client.message["g"] - self.full_gradient(client)

        def correct(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(shift)

        client.train(self.loss, correction=correct)
        return client.reply()

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step as FedAvg; the next round has gradients of its own."""
        return super().server_update(replace(server, extra={}), replies)

    def full_gradient(self, client: LocalClient) -> Tensor:
        """Compute the gradient of the mean loss over all samples at the weights as they are, in eval mode."""
        client.model.eval()
        total = torch.zeros_like(client.weights)
        for images, labels in client.samples.in_order(BATCH):
            client.flat.gradient.zero_()
            self.loss(client.context(images, labels)).backward()  # type: ignore[no-untyped-call]
            total.add_(client.flat.gradient, alpha=len(labels))
        return total / len(client.samples)
