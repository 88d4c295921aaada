from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Layout
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Replies, Server
from fedld.methods.closed import SumsMethod
from fedld.methods.moments import LinearProblem, head_inputs, head_of, set_head
from fedld.models import as_model


@dataclass(frozen=True)
class Newton(SumsMethod):
    """Softmax regression by Boehning's bound: the Hessian is at most A / 2n, whatever the weights are.

    Every round clients send the mean gradient g_i at the incoming head, and the server steps by
    -(A / 2n + lam I)^-1 (sum_i p_i g_i + lam W) in standardised inputs, the bias not regularised. With all
    clients the loss falls in every round, to the minimum of pooled softmax regression.
    """

    lam: float = 0.03

    card: ClassVar[Card] = Card(
        "Newton", "Boehning 1992", communication="second moments up, once; then the head's gradient"
    )

    def __post_init__(self) -> None:
        if not self.lam > 0:
            raise FedLDError("lam is a positive number: without it separable classes have no solution")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Start from zero, where the bound is tight."""
        server = super().init(weights, layout, sizes)
        views = layout.views(weights)
        zeros = [torch.zeros_like(views[name]) for name in head_of(layout)]
        return replace(server, weights=set_head(weights, layout, head_of(layout), zeros[0], zeros[1]))

    def client_update(self, client: LocalClient) -> Reply:
        """The update is the negative mean gradient; the model at the client stays as it is."""
        inputs, labels = head_inputs(client)
        head = as_model(client.model).head
        logits = F.linear(inputs, head.weight.to(inputs), head.bias.to(inputs)).detach()
        client.loss_sum = F.cross_entropy(logits, labels, reduction="sum").item()
        client.loss_count = len(labels)
        residual = torch.softmax(logits, 1) - F.one_hot(labels, logits.shape[1])
        slope = -(residual.T @ inputs) / len(labels), -residual.mean(0)
        reply = client.reply()
        gradient = set_head(torch.zeros_like(reply.update), client.layout, head_of(client.layout), *slope)
        client.layout.shared_buffers(gradient).copy_(client.layout.shared_buffers(reply.update))
        return replace(reply, update=gradient)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """A step by the bound of the Hessian."""
        combined, layout = self.aggregate(replies), replies.layout
        problem, names = LinearProblem.of(server.extra), head_of(layout)
        slope = torch.zeros_like(server.weights)
        layout.shared_parameters(slope).copy_(combined.update)
        (g, g_bias), (w, _) = (
            [layout.views(vector)[name].double() for name in names] for vector in (slope, server.weights)
        )
        # For inputs z = scale (x - mean) weights are w / scale, and slopes scale (g - mean g_bias).
        right = problem.scale[:, None] * (g - torch.outer(g_bias, problem.mean)).T
        right -= self.lam * w.T / problem.scale[:, None]
        bound = problem.scatter / (2 * problem.n) + self.lam * torch.eye(len(problem.mean)).to(
            problem.scatter
        )
        step = problem.head(torch.cholesky_solve(right, torch.linalg.cholesky(bound)), 2 * g_bias)
        moved = set_head(torch.zeros_like(server.weights), layout, names, *step)
        update = layout.shared_parameters(moved)
        return replace(server, weights=server.weights + moved), replace(combined, update=update)
