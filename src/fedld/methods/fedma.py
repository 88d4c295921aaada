from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Replies, Server
from fedld.methods.bbp import Matching
from fedld.methods.neurons import Layer, NeuronMatching, Permutation, pairs
from fedld.seeds import numpy_generator


@dataclass(frozen=True)
class FedMA(NeuronMatching):
    """Matched averaging, one layer per round: match neurons (Hungarian on the BBP-MAP cost), average, freeze.

    In round t of a cycle the clients train all layers from the t-th on, the earlier ones frozen. The server
    matches the neurons of those layers from the input upwards, permuting the next layer's inputs as it goes,
    and averages; in the last layer each class's row by the clients' counts of that class, whatever the rule.
    After the last layer a new cycle begins ("FedMA with communication"). Three liberties: the layers above
    the t-th are averaged as well, so a global model exists in every round and clients may be sampled; the
    width of a layer is held at the network's own, so no neurons are added; and gradients are clipped, since
    training some layers alone leads to places that are steep for the others, where the first round of the
    next cycle diverged.
    """

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0
    sweeps: int = 5
    clip: float = 1.0

    card: ClassVar[Card] = Card(
        "FedMA", "Wang et al. 2020", communication="a round for each layer, class counts", batchnorm=False
    )

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """No layer is frozen."""
        return Server(weights, {"frozen": torch.tensor(0), "layers": torch.tensor(len(pairs(layout)))})

    def broadcast(self, server: Server) -> Tree:
        """How many layers are frozen."""
        return {"frozen": server.extra["frozen"]}

    def client_update(self, client: LocalClient) -> Reply:
        """Train the layers that are not frozen."""
        free = pairs(client.layout)[int(client.message["frozen"]) :]

        def clipped(weights: Tensor, gradient: Tensor) -> None:
            gradient.mul_((self.clip / gradient.norm()).clamp(max=1.0))

        client.train(self.loss, correction=clipped, only={entry.name for pair in free for entry in pair})
        classes = free[-1][1].size
        counts = torch.bincount(client.samples.labels, minlength=classes)
        return client.reply(message={"counts": client.disclosed(counts)})

    def orders(self, server: Server, clients: Sequence[Sequence[Layer]]) -> list[list[Permutation]]:
        """From the input upwards: each layer is matched with its inputs already in the common order."""
        frozen, depth = int(server.extra["frozen"]), len(clients[0]) - 1
        orders_by_client: list[list[Permutation]] = [[] for _ in clients]
        for level in range(depth):
            stack = [client[level] for client in clients]
            neurons = [
                self._neurons(layer, client_orders[-1:])
                for layer, client_orders in zip(stack, orders_by_client, strict=True)
            ]
            orders = [np.arange(len(stack[0].bias))] * len(clients)
            if level >= frozen and len(clients) > 1:
                orders = self._match(neurons, level)
            for client_orders, order in zip(orders_by_client, orders, strict=True):
                client_orders.append(order)
        return orders_by_client

    def _neurons(self, layer: Layer, inputs: Sequence[Permutation]) -> np.ndarray:
        weight = layer.weight[:, inputs[0]] if inputs else layer.weight
        return torch.cat([weight.flatten(1), layer.bias[:, None]], 1).numpy()

    def _match(self, neurons: list[np.ndarray], level: int) -> list[Permutation]:
        generator = numpy_generator(0, "fedma", level)
        sweeps = [generator.permutation(len(neurons)).tolist() for _ in range(self.sweeps)]
        matching = Matching(neurons, self.sigma, self.sigma0, self.gamma, width=len(neurons[0])).run(sweeps)
        # Sweeps may shuffle the global neurons; the first client's order is the common one.
        first = matching.assignment[0]
        return [np.argsort(matching.assignment[j])[first] for j in range(len(neurons))]

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """FedAvg's step, class by class in the last layer; one more layer is frozen, or all are set free."""
        update, shares = update.clone(), class_shares(replies).to(update)
        for entry in pairs(replies.layout)[-1]:
            rows = torch.stack([entry.view(update) for update in replies.updates])
            entry.view(update).copy_(torch.einsum("mc,mc...->c...", shares, rows))
        frozen = (server.extra["frozen"] + 1) % server.extra["layers"]
        return super().step(replace(server, extra={**server.extra, "frozen": frozen}), replies, update)


def class_shares(replies: Replies) -> Tensor:
    """(m, C): what share of a class's samples a client has; of a class without samples, its weight p."""
    counts = replies.stack("counts").double()
    return torch.where(counts.sum(0) > 0, counts / counts.sum(0).clamp(min=1), replies.p[:, None])
