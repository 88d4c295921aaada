"""Methods that match hidden neurons before they average: FedMA and GAMF.

Hidden neurons have no order. `NeuronMatching` rearranges every client's neurons into a common order; FedMA
finds it by BBP-MAP matching (Yurochkin et al. 2019), GAMF by graduated assignment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Entry, Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server
from fedld.models import PlainCNN
from fedld.seeds import numpy_generator

Array = NDArray[np.float64]


@dataclass(kw_only=True)
class Matching:
    """Global neurons as sums of the clients' neurons assigned to them; `assignment[j][l]` is one of them.

    `width` bounds the number of global neurons; None lets new ones appear.
    """

    neurons: Sequence[Array]
    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0
    width: int | None = None
    assignment: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums: Array = np.zeros((0, self.neurons[0].shape[1]))
        self.counts: Array = np.zeros(0)

    @property
    def means(self) -> Array:
        """Posterior means of the global neurons."""
        return np.asarray(self.sums / self.sigma**2 / self._precision(self.counts)[:, None])

    def _precision(self, counts: Array | float) -> Array:
        return np.asarray(1 / self.sigma0**2 + counts / self.sigma**2)

    def gains(self, j: int) -> Array:
        """Compute the gain in log posterior of giving neuron l of client j to global neuron i, old or new."""
        w, s, J = self.neurons[j] / self.sigma**2, self.sums / self.sigma**2, len(self.neurons)
        squares = (w**2).sum(1)[:, None] + 2 * w @ s.T + (s**2).sum(1)
        old = squares / self._precision(self.counts + 1) - (s**2).sum(1) / self._precision(self.counts)
        old += np.log(self.counts / (J - self.counts))
        room = len(w) if self.width is None else min(len(w), self.width - len(s))
        new = (w**2).sum(1)[:, None] / self._precision(1.0) + 2 * np.log(self.gamma / J)
        return np.hstack([old, new - 2 * np.log(np.arange(1, room + 1))])

    def add(self, j: int) -> None:
        """Assign all neurons of client j at once (Hungarian)."""
        client_neurons = self.neurons[j]
        chosen = (
            scipy.optimize.linear_sum_assignment(-self.gains(j))[1]
            if len(self.sums)
            else np.arange(len(client_neurons))
        )
        fresh = np.sort(chosen[chosen >= len(self.sums)])
        places = np.where(chosen < len(self.sums), chosen, len(self.sums) + np.searchsorted(fresh, chosen))
        self.sums = np.vstack([self.sums, np.zeros((len(fresh), client_neurons.shape[1]))])
        self.counts = np.append(self.counts, np.zeros(len(fresh)))
        self.sums[places] += client_neurons
        self.counts[places] += 1
        self.assignment[j] = places

    def remove(self, j: int) -> None:
        """Take client j out; global neurons that were only its own disappear."""
        places = self.assignment.pop(j)
        self.sums[places] -= self.neurons[j]
        self.counts[places] -= 1
        keep = self.counts > 0
        self.sums, self.counts = self.sums[keep], self.counts[keep]
        renumbered = np.cumsum(keep) - 1
        self.assignment = {k: renumbered[old] for k, old in self.assignment.items()}

    def run(self, sweeps: Iterable[Sequence[int]]) -> "Matching":
        """Match all clients once, the largest first; then each sweep removes and rematches every client."""
        for j in sorted(range(len(self.neurons)), key=lambda j: -len(self.neurons[j])):
            self.add(j)
        for sweep in sweeps:
            for j in sweep:
                self.remove(j)
                self.add(j)
        return self


Permutation = NDArray[np.int64]
"""Place g of the common order holds neuron order[g] of the client."""


@dataclass(frozen=True)
class Layer:
    """Weights (out, in, k) and bias (out,) of a convolution (k its taps) or of a linear layer.

    A linear layer after a convolution sees k cells of every channel.
    """

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class NeuronMatching(Method):
    """Average after every client's neurons were put into one order, that of the first client."""

    def check(self, model: nn.Module) -> None:
        """Accept plain stacks only: shortcuts tie the order of distant layers, BatchNorm adds statistics."""
        if not isinstance(model, PlainCNN):
            raise FedLDError(
                f"{self.card.title} matches neurons of plain stacks (models cnn, vgg9); it cannot match "
                f"{type(model).__name__}, which has shortcuts or normalisation"
            )

    def orders(self, server: Server, clients: Sequence[Sequence[Layer]]) -> list[list[Permutation]]:
        """Compute for every client an order of the neurons of every hidden layer."""
        raise NotImplementedError

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step as FedAvg on the rearranged models."""
        layout, models = replies.layout, server.weights + replies.updates
        orders = self.orders(server, [layers(layout, model) for model in models])
        matched = torch.stack([rearranged(layout, *pair) for pair in zip(models, orders, strict=True)])
        return super().server_update(server, replace(replies, updates=matched - server.weights))


def pairs(layout: Layout) -> list[tuple[Entry, Entry]]:
    """List weight and bias of every layer, in order of computation."""
    entries = [entry for entry in layout.entries if entry.kind == "parameter"]
    return list(zip(entries[::2], entries[1::2], strict=True))


def layers(layout: Layout, vector: Tensor) -> list[Layer]:
    """List the layers of a plain network, in float64."""
    layers: list[Layer] = []
    for weight, bias in pairs(layout):
        view = weight.view(vector).double()
        inputs = len(layers[-1].bias) if layers else weight.shape[1]
        layers.append(Layer(view.reshape(len(view), inputs, -1), bias.view(vector).double()))
    return layers


def rearranged(layout: Layout, vector: Tensor, orders: Sequence[Permutation]) -> Tensor:
    """Rearrange the neurons of a network's hidden layers."""
    result, stack = vector.clone(), layers(layout, vector)
    everything = [torch.arange(len(stack[-1].bias))]
    outs = [torch.from_numpy(order) for order in orders] + everything
    ins = [torch.arange(stack[0].weight.shape[1]), *outs]
    for (weight, bias), layer, into, out in zip(pairs(layout), stack, ins, outs, strict=False):
        weight.view(result).copy_(layer.weight[out][:, into].reshape(weight.shape))
        bias.view(result).copy_(layer.bias[out])
    return result


@dataclass(frozen=True, kw_only=True)
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
        """Store that no layer is frozen."""
        return Server(weights, {"frozen": torch.tensor(0), "layers": torch.tensor(len(pairs(layout)))})

    def broadcast(self, server: Server) -> Tree:
        """Send how many layers are frozen."""
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
        """Match layers from the input upwards, each with its inputs already in the common order."""
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
        matching = Matching(
            neurons=neurons, sigma=self.sigma, sigma0=self.sigma0, gamma=self.gamma, width=len(neurons[0])
        ).run(sweeps)
        # Sweeps may shuffle the global neurons; the first client's order is the common one.
        first = matching.assignment[0]
        return [np.argsort(matching.assignment[j])[first] for j in range(len(neurons))]

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Step as FedAvg, class by class in the last layer; freeze one more layer, or set all free."""
        update, shares = update.clone(), class_shares(replies).to(update)
        for entry in pairs(replies.layout)[-1]:
            rows = torch.stack([entry.view(update) for update in replies.updates])
            entry.view(update).copy_(torch.einsum("mc,mc...->c...", shares, rows))
        frozen = (server.extra["frozen"] + 1) % server.extra["layers"]
        return super().step(replace(server, extra={**server.extra, "frozen": frozen}), replies, update)


def class_shares(replies: Replies) -> Tensor:
    """Compute (m, C): a client's share of a class's samples; its weight p for a class without samples."""
    counts = replies.stack("counts").double()
    return torch.where(counts.sum(0) > 0, counts / counts.sum(0).clamp(min=1), replies.p[:, None])


@dataclass(frozen=True)
class GAMF(NeuronMatching):
    """Graduated-assignment model fusion: channels of all clients are matched as graphs, then averaged.

    A network is a graph of channels with weights as edges. Doubly stochastic matrices P_i^l take the
    channels of client i to a common order; in turn for every client and layer P <- Sinkhorn(M / tau), M being
    the inner products of its incoming and outgoing weights with those of the mean aligned network, while tau
    falls to `tau_min`. The Hungarian algorithm makes permutations of them. The first client gives the order.
    """

    tau: float = 0.05
    tau_min: float = 0.005
    steps: int = 6
    iterations: int = 30

    card: ClassVar[Card] = Card("GAMF", "Liu et al. 2022", batchnorm=False)

    def orders(self, server: Server, clients: Sequence[Sequence[Layer]]) -> list[list[Permutation]]:
        """Anneal the soft assignments, then make them hard."""
        widths = [len(layer.bias) for layer in clients[0]]
        soft = [_start(clients[0], widths, i) for i in range(len(clients))]
        mean: Sequence[Layer] = clients[0]
        for tau in np.geomspace(self.tau, self.tau_min, self.steps):
            for layers, P in zip(clients[1:], soft[1:], strict=True):
                for level in range(len(widths) - 1):
                    M = affinity(layers, P, mean, level)
                    P[level + 1] = sinkhorn(M / M.abs().max().clamp(min=1e-30) / tau, self.iterations)
            mean = _mean([aligned(layers, P) for layers, P in zip(clients, soft, strict=True)])
        hard = [[scipy.optimize.linear_sum_assignment(-p.T.numpy())[1] for p in P[1:-1]] for P in soft]
        return [[np.asarray(order, dtype=np.int64) for order in orders] for orders in hard]


def affinity(layers: Sequence[Layer], P: Sequence[Tensor], mean: Sequence[Layer], level: int) -> Tensor:
    """Compute M[o, c]: how alike the weights in and out of the client's channel o and common channel c are.

    P[l] takes the inputs of layer l to the common order and P[l + 1] its outputs.
    """
    here, above = layers[level], layers[level + 1]
    incoming = torch.einsum("oik,id->odk", here.weight, P[level])
    outgoing = torch.einsum("qok,qr->rok", above.weight, P[level + 2])
    return (
        torch.einsum("odk,cdk->oc", incoming, mean[level].weight)
        + torch.einsum("rok,rck->oc", outgoing, mean[level + 1].weight)
        + torch.outer(here.bias, mean[level].bias)
    )


def sinkhorn(scores: Tensor, iterations: int) -> Tensor:
    """Make exp(scores) doubly stochastic: normalise rows and columns in turn, rows first.

    >>> sinkhorn(torch.zeros(2, 2), 4)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    for turn in range(iterations):
        scores = scores.log_softmax(1 - turn % 2)
    return scores.exp()


def aligned(layers: Sequence[Layer], P: Sequence[Tensor]) -> list[Layer]:
    """Bring the client's network into the common order, as far as the soft assignments go."""
    return [
        Layer(torch.einsum("oc,oik,id->cdk", P[i + 1], layer.weight, P[i]), layer.bias @ P[i + 1])
        for i, layer in enumerate(layers)
    ]


def _mean(stacks: Sequence[Sequence[Layer]]) -> list[Layer]:
    return [
        Layer(torch.stack([x.weight for x in level]).mean(0), torch.stack([x.bias for x in level]).mean(0))
        for level in zip(*stacks, strict=True)
    ]


def _start(reference: Sequence[Layer], widths: Sequence[int], client: int) -> list[Tensor]:
    """Start with inputs and classes in order, and hidden channels equal; the first client gives the order."""

    def identity(size: int) -> Tensor:
        return torch.eye(size, dtype=torch.float64)

    hidden = [identity(w) if client == 0 else torch.full_like(identity(w), 1 / w) for w in widths[:-1]]
    return [identity(reference[0].weight.shape[1]), *hidden, identity(widths[-1])]
