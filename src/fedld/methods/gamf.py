from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor

from fedld.methods.base import Card, Server
from fedld.methods.neurons import Layer, NeuronMatching, Permutation


@dataclass(frozen=True)
class GAMF(NeuronMatching):
    """Graduated-assignment model fusion: channels of all clients are matched as graphs, then averaged.

    A network is a graph of channels whose edges are weights. Doubly stochastic matrices P_i^l take the
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
    """M[o, c]: likeness of the client's channel o and the common channel c by what goes in and comes out.

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
    """exp(scores) made doubly stochastic: rows and columns normalised in turn, rows first.

    >>> sinkhorn(torch.zeros(2, 2), 4)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    for turn in range(iterations):
        scores = scores.log_softmax(1 - turn % 2)
    return scores.exp()


def aligned(layers: Sequence[Layer], P: Sequence[Tensor]) -> list[Layer]:
    """The client's network in the common order, as far as the soft assignments know it."""
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
    """Inputs and classes are in order; of hidden channels nothing is known, save for the first client."""

    def identity(size: int) -> Tensor:
        return torch.eye(size, dtype=torch.float64)

    hidden = [identity(w) if client == 0 else torch.full_like(identity(w), 1 / w) for w in widths[:-1]]
    return [identity(reference[0].weight.shape[1]), *hidden, identity(widths[-1])]
