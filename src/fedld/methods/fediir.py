from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedld.layout import Tree
from fedld.local import Context, LocalClient, Reply
from fedld.methods.base import Card, Messages, Method, Replies, Server
from fedld.methods.features import BATCH
from fedld.models import as_model


@dataclass(frozen=True)
class FedIIR(Method):
    """Implicit invariant relationships: the head's gradient shall be the same at every client.

    First:   every client sends its head's gradient at the incoming model, over all of its samples
    Server:  gm <- ema * gm + (1 - ema) * mean of these gradients, from gm = 0
    Client:  objective + gamma |grad_head - gm|^2, differentiated through the gradient of the head

    That is one more exchange before the training of each round. With `lagged` the gradients come with the
    replies instead, and gm is one round old; the first round then has none and trains as FedAvg.
    """

    gamma: float = 1e-3
    ema: float = 0.95
    lagged: bool = False

    card: ClassVar[Card] = Card("FedIIR", "Guo et al. 2023", communication="head gradient each way")

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)

    def broadcast(self, server: Server) -> Tree:
        """Send the mean gradient, once there is one."""
        return server.extra

    @property
    def prepares(self) -> bool:
        """The gradients of this round, unless those of the last will do."""
        return not self.lagged

    def prepare(self, client: LocalClient) -> Tree:
        """Compute the gradient of the head at the incoming model."""
        return {"gradient": self.mean_gradient(client)}

    def prepared_lengths(self, message: Tree) -> dict[str, float]:
        """Measure the length of the gradient."""
        return {"gradient": float(torch.linalg.vector_norm(message["gradient"], dtype=torch.float64))}

    def gather(self, server: Server, messages: Messages) -> Server:
        """Update the moving average of the gradients, started at zero."""
        new = messages.mean("gradient")
        gm = self.ema * server.extra.get("gm", torch.zeros_like(new)) + (1 - self.ema) * new
        return replace(server, extra={"gm": gm})

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the penalised objective."""
        message = self.prepare(client) if self.lagged else {}
        common = client.message.get("gm")

        def invariant(context: Context) -> Tensor:
            value, gradient = self.head_gradient(context)
            return value if common is None else value + self.gamma * (gradient - common).square().sum()

        client.train(invariant)
        return client.reply(message=message)

    def head_gradient(self, context: Context) -> tuple[Tensor, Tensor]:
        """Compute the objective on a batch and its differentiable gradient in the head's parameters."""
        value = self.objective.loss(context)
        head = as_model(context.model).head
        parts = torch.autograd.grad(value, list(head.parameters()), create_graph=True)
        return value, torch.cat([part.flatten() for part in parts])

    def mean_gradient(self, client: LocalClient) -> Tensor:
        """Average the head's gradient over all of the client's samples, in eval mode."""
        client.model.eval()
        total: Tensor | float = 0.0
        for images, labels in client.samples.in_order(BATCH):
            total = total + len(labels) * self.head_gradient(client.context(images, labels))[1].detach()
        assert isinstance(total, Tensor)
        return total / len(client.samples)

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step as FedAvg; the lagged form has its gradients now."""
        return super().step(self.gather(server, replies) if self.lagged else server, replies, update)
