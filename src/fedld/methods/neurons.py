"""Hidden neurons have no order: what FedMA and GAMF share to find a common one before they average."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.aggregation import Aggregate
from fedld.errors import FedLDError
from fedld.layout import Entry, Layout
from fedld.methods.base import Method, Replies, Server
from fedld.models import PlainCNN

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
        """Plain stacks only: shortcuts tie the order of distant layers, BatchNorm adds statistics to it."""
        if not isinstance(model, PlainCNN):
            raise FedLDError(
                f"{self.card.title} matches neurons of plain stacks (models cnn, vgg9); it cannot match "
                f"{type(model).__name__}, which has shortcuts or normalisation"
            )

    def orders(self, server: Server, clients: Sequence[Sequence[Layer]]) -> list[list[Permutation]]:
        """For every client an order of the neurons of every hidden layer."""
        raise NotImplementedError

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """FedAvg's, on the rearranged models."""
        layout, models = replies.layout, server.weights + replies.updates
        orders = self.orders(server, [layers(layout, model) for model in models])
        matched = torch.stack([rearranged(layout, *pair) for pair in zip(models, orders, strict=True)])
        return super().server_update(server, replace(replies, updates=matched - server.weights))


def pairs(layout: Layout) -> list[tuple[Entry, Entry]]:
    """Weight and bias of every layer, in order of computation."""
    entries = [entry for entry in layout.entries if entry.kind == "parameter"]
    return list(zip(entries[::2], entries[1::2], strict=True))


def layers(layout: Layout, vector: Tensor) -> list[Layer]:
    """A plain network as a list of layers, in float64."""
    layers: list[Layer] = []
    for weight, bias in pairs(layout):
        view = weight.view(vector).double()
        inputs = len(layers[-1].bias) if layers else weight.shape[1]
        layers.append(Layer(view.reshape(len(view), inputs, -1), bias.view(vector).double()))
    return layers


def rearranged(layout: Layout, vector: Tensor, orders: Sequence[Permutation]) -> Tensor:
    """The same network with the neurons of its hidden layers in another order."""
    result, stack = vector.clone(), layers(layout, vector)
    everything = [torch.arange(len(stack[-1].bias))]
    outs = [torch.from_numpy(order) for order in orders] + everything
    ins = [torch.arange(stack[0].weight.shape[1]), *outs]
    for (weight, bias), layer, into, out in zip(pairs(layout), stack, ins, outs, strict=False):
        weight.view(result).copy_(layer.weight[out][:, into].reshape(weight.shape))
        bias.view(result).copy_(layer.bias[out])
    return result
