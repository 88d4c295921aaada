from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates against client drift (Algorithm 1, option II, of the paper).

    Client:  y <- y - lr (g - c_i + c);  c_i+ = c_i - c + (x - y) / (K lr)
    Server:  x <- x + eta * mean(y - x);  c <- c + sum_i (c_i+ - c_i) / N, over all N clients

    With momentum K lr becomes the sum of the weights of the gradients, so c_i stays a mean gradient.
    """

    eta: float = 1.0

    card: ClassVar[Card] = Card(
        "SCAFFOLD",
        "Karimireddy et al. 2020",
        communication="a model each way (c)",
    )

    def init(self, weights: Tensor, layout: Layout, clients: int) -> Server:
        """Control variate c = 0."""
        return Server(
            weights, {"c": torch.zeros_like(weights[: layout.trainable]), "N": torch.tensor(clients)}
        )

    def broadcast(self, server: Server) -> Tree:
        """The server's control variate."""
        return {"c": server.extra["c"]}

    def client_update(self, client: LocalClient) -> Reply:
        """SGD corrected by c - c_i; the new c_i stays here, its change goes to the server."""
        x, c = client.weights.clone(), client.message["c"]
        c_i = client.state.get("c_i", torch.zeros_like(c))
        shift = c - c_i

        def control(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(shift)

        client.train(self.loss, correction=control)
        new = (x - client.weights) / client.travel - shift
        return client.reply(message={"change": new - c_i}, state={"c_i": new})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step of length eta along the aggregate; c moves by the clients' changes over all N clients."""
        combined = self.aggregate(replies)
        c = server.extra["c"] + sum(message["change"] for message in replies.messages) / server.extra["N"]
        server = replace(server, extra={**server.extra, "c": c})
        return self.step(server, replies, self.eta * combined.update), combined
