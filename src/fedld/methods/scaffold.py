from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, MessageSum, Method, Replies, Server, shares


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Algorithm 1, option II, of the paper).

    Client:  y <- y - lr (g - c_i + c);  c_i+ = c_i - c + (x - y) / (K lr)
    Server:  x <- x + eta * mean(y - x);  c <- c + sum_i p_i (c_i+ - c_i), p over all clients

    So c = sum_i p_i c_i with the weights of Eq. 1, whose optimum is the fixed point. The paper's objective is
    the plain mean over clients, p_i = 1/N: that is `client_weights = "uniform"`. With momentum K lr becomes
    the sum of the weights of the gradients, so c_i stays a mean gradient. With Adam, kept moments or a
    rate of the head's own, c_i is the plain mean of the gradients: the correction enters the moments too.
    """

    eta: float = 1.0

    sums_suffice: ClassVar[bool] = True
    message_sums: ClassVar[Mapping[str, MessageSum]] = {"change": MessageSum(2.0**20)}

    card: ClassVar[Card] = Card(
        "SCAFFOLD",
        "Karimireddy et al. 2020",
        communication="a model each way (c)",
    )

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Control variate c = 0, and the weight of every client in it."""
        c = torch.zeros_like(weights[: layout.trainable])
        return Server(weights, {"c": c, "p": shares(sizes, self.client_weights).to(c.dtype)})

    def broadcast(self, server: Server) -> Tree:
        """The server's control variate."""
        return {"c": server.extra["c"]}

    def client_update(self, client: LocalClient) -> Reply:
        """SGD corrected by c - c_i; the new c_i stays here, its change goes to the server."""
        c = client.message["c"]
        c_i = client.state.get("c_i", torch.zeros_like(c))
        shift = c - c_i

        def control(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(shift)

        client.train(self.loss, correction=control, average=True)
        assert client.mean_gradient is not None
        new = client.mean_gradient - shift
        return client.reply(message={"change": new - c_i}, state={"c_i": new})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step of length eta along the aggregate; c moves by the changes of this round's clients."""
        combined = self.aggregate(replies).scaled(self.eta)
        c = server.extra["c"] + replies.over_all(server.extra["p"], replies.stack("change"))
        server = replace(server, extra={**server.extra, "c": c})
        return self.step(server, replies, combined.update), combined
