from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, MessageSum, Method, Replies, Server, shares


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Algorithm 1, option II, of the paper).

    Client:  y <- y - lr (g - c_i + c);  c_i+ = c_i - c + (x - y) / (K lr)
    Server:  v <- beta v + eta * mean(y - x);  x <- x + v
             c <- c + sum_i p_i (c_i+ - c_i), p over all clients

    So c = sum_i p_i c_i with the weights of Eq. 1, whose optimum is the fixed point. The paper's objective is
    the plain mean over clients, p_i = 1/N: that is `client_weights = "uniform"`. With momentum K lr becomes
    the sum of the weights of the gradients, so c_i stays a mean gradient. With Adam, kept moments or a
    rate of the head's own, c_i is the plain mean of the gradients: the correction enters the moments too.

    `beta` is momentum on the server, 0 in the paper: a lasting direction is followed at 1 / (1 - beta) times
    the pace, where longer steps (`eta`) would overshoot across it.

    With c_i = 0 the first round is one of FedAvg, drift included. `first = "gradient"` replaces it: in its
    first round a client takes one step along the mean gradient of an epoch, which becomes its c_i.
    """

    eta: float = 1.0
    first: str = "zero"
    beta: float = 0.0

    sums_suffice: ClassVar[bool] = True
    message_sums: ClassVar[Mapping[str, MessageSum]] = {"change": MessageSum(2.0**20)}

    card: ClassVar[Card] = Card(
        "SCAFFOLD",
        "Karimireddy et al. 2020",
        communication="a model each way (c)",
    )

    def __post_init__(self) -> None:
        if self.first not in ("zero", "gradient"):
            raise FedLDError(f"first is 'zero' or 'gradient', not {self.first!r}")
        if not 0 <= self.beta < 1:
            raise FedLDError(f"beta, the server's momentum, is at least 0 and below 1, not {self.beta:g}")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store the control variate c = 0, and the weight of every client in it."""
        c = torch.zeros_like(weights[: layout.trainable])
        extra = {"c": c, "p": shares(sizes, self.client_weights).to(c.dtype)}
        if self.beta:
            extra["velocity"] = torch.zeros_like(weights[: layout.shared])
        return Server(weights, extra)

    def broadcast(self, server: Server) -> Tree:
        """Send the server's control variate."""
        return {"c": server.extra["c"]}

    def client_update(self, client: LocalClient) -> Reply:
        """Train with the correction c - c_i; the new c_i stays here, its change goes to the server."""
        c = client.message["c"]
        if self.first == "gradient" and "c_i" not in client.state:
            return self._first_update(client)
        c_i = client.state.get("c_i", torch.zeros_like(c))
        shift = c - c_i

        def control(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(shift)

        client.train(self.loss, correction=control, average=True)
        assert client.mean_gradient is not None
        new = client.mean_gradient - shift
        return client.reply(message={"change": new - c_i}, state={"c_i": new})

    def _first_update(self, client: LocalClient) -> Reply:
        """Step along the mean gradient of an epoch at the incoming weights."""
        total = torch.zeros_like(client.weights)

        def gather(weights: Tensor, gradient: Tensor) -> None:
            total.add_(gradient)
            gradient.zero_()

        client.train(self.loss, correction=gather, epochs=1)
        mean = total / client.steps
        client.step_along(mean.clone())
        return client.reply(message={"change": mean}, state={"c_i": mean})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step of length eta along the aggregate plus beta times the last step; c moves by the changes."""
        combined = self.aggregate(replies).scaled(self.eta)
        extra = dict(server.extra)
        if self.beta:
            extra["velocity"] = self.beta * extra["velocity"] + combined.update
            combined = replace(combined, update=extra["velocity"])
        c = server.extra["c"] + replies.over_all(server.extra["p"], replies.stack("change"))
        server = replace(server, extra={**extra, "c": c})
        return self.step(server, replies, combined.update), combined
