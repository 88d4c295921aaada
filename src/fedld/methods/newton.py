"""Newton steps for a linear head: multinomial logistic regression, and the stratified Cox model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.local.base import TaskObjective
from fedld.methods.base import Card, MessageSum, Replies, Server
from fedld.methods.closed import SUMS, SumsMethod, cholesky_solve
from fedld.methods.moments import (
    Codes,
    LinearProblem,
    client_sums,
    head_inputs,
    head_of,
    set_head,
    sum_of,
    symmetric,
    triangle,
)
from fedld.models import as_model
from fedld.tasks.survival import Survival, partial_likelihood


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
        return replace(server, weights=set_head(weights, layout, head_of(layout), zeros[0], bias=zeros[1]))

    def client_update(self, client: LocalClient) -> Reply:
        """Send the negative mean gradient as update; the model at the client stays as it is."""
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
        """Step by the bound of the Hessian."""
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


DERIVATIVES = ("gradient", "hessian", "count")


@dataclass(frozen=True)
class CoxNewton(SumsMethod):
    """Cox's partial likelihood with Breslow's ties, every client a stratum: the pooled stratified answer.

    Every round clients send gradient and Hessian of their own likelihood at the common coefficients b. The
    server steps by -(H / n + lam I)^-1 (g / n + lam b) in standardised inputs, divided by 1 + d where d is
    the length of the step in the metric of the Hessian. Coefficients travel in float64.
    """

    lam: float = 0.03

    card: ClassVar[Card] = Card("Newton", "Cox 1972", communication="gradient and Hessian of the head up")
    message_sums: ClassVar[Mapping[str, MessageSum]] = SUMS | {
        key: MessageSum(2.0**16, weighted=False, per_sample=True) for key in DERIVATIVES
    }

    @classmethod
    def of(cls, method: Newton, task: Survival) -> "CoxNewton":
        """Give the same method for survival."""
        shared = {key: value for key, value in vars(method).items() if key != "objective"}
        return cls(**shared, objective=TaskObjective(task))

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Start from zero: all samples have the same risk."""
        server = super().init(weights, layout, sizes)
        views, names = layout.views(weights), head_of(layout)
        zeros = [torch.zeros_like(views[name]) for name in names]
        coefficients = torch.zeros(zeros[0].numel(), dtype=torch.float64)
        return Server(
            set_head(weights, layout, names, zeros[0], bias=zeros[1]), {**server.extra, "cox": coefficients}
        )

    def broadcast(self, server: Server) -> Tree:
        """Send the coefficients in float64."""
        return {"cox": server.extra["cox"]}

    def sums(self, client: LocalClient) -> Tree:
        """Compute X'X, for means and deviations of the inputs."""
        return client_sums(client, Codes(_ones, _no_losses, scaled=False, task=Survival()))

    def client_update(self, client: LocalClient) -> Reply:
        """Send the negative mean gradient as update, and the Hessian; the client's model stays as it is."""
        inputs, targets = head_inputs(client, Survival())
        loss, gradient, hessian = cox_derivatives(inputs, targets, client.message["cox"].to(inputs))
        client.loss_sum, client.loss_count = loss.item(), len(targets)
        message = {
            "gradient": gradient,
            "hessian": triangle(hessian),
            "count": torch.tensor(float(len(targets)), dtype=torch.float64),
        }
        reply = client.reply(message=message)
        slope = -gradient[None] / len(targets), torch.zeros(1)
        update = set_head(torch.zeros_like(reply.update), client.layout, head_of(client.layout), *slope)
        client.layout.shared_buffers(update).copy_(client.layout.shared_buffers(reply.update))
        return replace(reply, update=update)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Make a damped Newton step; the bias makes the mean sample's log risk 0."""
        combined, layout = self.aggregate(replies), replies.layout
        messages = [message for message in replies.messages if "hessian" in message]
        if not messages or "moments" not in server.extra:
            return server, combined
        gradient, hessian, count = (sum_of([message[key] for message in messages]) for key in DERIVATIVES)
        problem = LinearProblem.of(server.extra)
        standardised = server.extra["cox"] / problem.scale
        step = newton_step(
            problem.scale * gradient / count,
            problem.scale[:, None] * symmetric(hessian) * problem.scale / count,
            standardised,
            self.lam,
        )
        weight, bias = problem.head((standardised + step)[:, None], torch.zeros(1).to(step))
        weights = set_head(server.weights, layout, head_of(layout), weight, bias=bias)
        moved = layout.shared_parameters(weights - server.weights)
        return Server(weights, {**server.extra, "cox": weight[0]}), replace(combined, update=moved)


def newton_step(gradient: Tensor, hessian: Tensor, weights: Tensor, lam: float) -> Tensor:
    """Give a damped Newton step of a convex loss with the penalty lam |w|^2 / 2."""
    slope = gradient + lam * weights
    damped = hessian + lam * torch.eye(len(weights)).to(hessian)
    step = -cholesky_solve(damped, slope[:, None])[:, 0]
    length = torch.sqrt((-(slope @ step)).clamp_min(0))
    return step / (1 + length)


def cox_derivatives(inputs: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the negative log partial likelihood of one stratum, its gradient and its Hessian.

    With r_j = exp(x_j'b), S(t) = sum of r_j still at risk and M(t) their weighted mean of x, event i adds
    log S(t_i) - x_i'b, M(t_i) - x_i, and sum_j r_j x_j x_j' / S(t_i) - M(t_i) M(t_i)'.

    Args:
        inputs: (N, D).
        targets: (N, 2) times and events.
        weights: (D,) coefficients b.

    >>> x, t = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    >>> [round(part.item(), 4) for part in cox_derivatives(x, t, torch.zeros(1))]
    [0.6931, -0.5, 0.25]
    """
    risk = inputs @ weights
    loss = partial_likelihood(risk, targets).sum()
    order = torch.argsort(targets[:, 0], descending=True, stable=True)
    x, times, events = inputs[order], targets[order, 0], targets[order, 1].to(inputs) > 0
    r = torch.exp(risk[order] - risk.max())
    last = torch.searchsorted(-times, -times, right=True) - 1  # all of equal times are at risk
    at_risk = torch.cumsum(r, 0)[last]
    means = torch.cumsum(r[:, None] * x, 0)[last] / at_risk[:, None]
    # Sample j is at risk at every event up to its own time: its weight is r_j times the sum of 1 / S there.
    hazards = torch.where(events, 1 / at_risk, 0.0).flip(0).cumsum(0).flip(0)
    first = torch.searchsorted(-times, -times)
    share = r * hazards[first]
    gradient = share @ x - x[events].sum(0)
    hessian = (share[:, None] * x).T @ x - means[events].T @ means[events]
    return loss, gradient, hessian


def _ones(targets: Tensor, outputs: int) -> Tensor:
    return torch.ones(len(targets), outputs)


def _no_losses(values: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    raise NotImplementedError
