from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedld.layout import Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.features import BATCH, as_model


@dataclass(frozen=True)
class FedIIR(Method):
    """Implicit invariant relationships: the head's gradient shall be the same at every client.

    Client:  objective + gamma |grad_head - gm|^2, differentiated through the gradient of the head
    Server:  gm <- ema * gm + (1 - ema) * mean of the clients' head gradients at the incoming model

    The clients' gradients come with the replies, at the price of one more pass over the samples and not of a
    second exchange, so gm is that of the round before; the first round has none and trains as FedAvg.
    """

    gamma: float = 1e-3
    ema: float = 0.95

    card: ClassVar[Card] = Card("FedIIR", "Guo et al. 2023", communication="head gradient each way")

    def check(self, model: nn.Module) -> None:
        """It needs features and a head."""
        as_model(model)

    def broadcast(self, server: Server) -> Tree:
        """The mean gradient, once there is one."""
        return server.extra

    def client_update(self, client: LocalClient) -> Reply:
        """Gradient of the head at the incoming model, then SGD on the penalised objective."""
        gradient = self.mean_gradient(client)
        common = client.message.get("gm")

        def invariant(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
            value, own = self.head_gradient(model, images, labels)
            return value if common is None else value + self.gamma * (own - common).square().sum()

        client.train(invariant)
        return client.reply(message={"gradient": gradient})

    def head_gradient(self, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The objective on a batch and its gradient in the head's parameters, itself differentiable."""
        network = as_model(model)
        value = self.judge(network.head(network.embed(images)), labels)
        parts = torch.autograd.grad(value, list(network.head.parameters()), create_graph=True)
        return value, torch.cat([part.flatten() for part in parts])

    def mean_gradient(self, client: LocalClient) -> Tensor:
        """Gradient of the head over all of the client's samples, in eval mode."""
        client.model.eval()
        total: Tensor | float = 0.0
        for images, labels in client.samples.in_order(BATCH):
            total = total + len(labels) * self.head_gradient(client.model, images, labels)[1].detach()
        assert isinstance(total, Tensor)
        return total / len(client.samples)

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """FedAvg's step, and the moving average of the gradients."""
        new = replies.mean("gradient")
        gm = self.ema * server.extra.get("gm", new) + (1 - self.ema) * new
        return super().step(replace(server, extra={"gm": gm}), replies, update)
