"""A linear model of a sample of any shape, with a hidden layer where the head has one: for tables."""

import math

import torch
from torch import nn

from fedld.models.base import Block, Model, head_layers
from fedld.models.build import hidden_units, initialise

NAME = "linear"


class VectorModel(Model):
    """Flattened inputs, then the head: one linear layer, or two with ReLU between."""

    def __init__(self, inputs: int, outputs: int, hidden: int = 0) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(*head_layers(inputs, hidden, outputs))
        layers = tuple(f"classifier.{k}" for k in range(len(self.classifier)))
        self.blocks = (Block("classifier.0", ("flatten", *layers)),)


def build_vector(*, outputs: int, input_shape: tuple[int, ...], seed: int, head: str = "linear") -> Model:
    """Build a linear model, or with `head` "mlp:64" one with 64 hidden units; the seed decides its weights.

    >>> build_vector(outputs=1, input_shape=(12,), seed=0)(torch.zeros(2, 12)).shape
    torch.Size([2, 1])
    """
    with torch.device("meta"):
        model = VectorModel(math.prod(input_shape), outputs, hidden_units(head))
    empty = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    return initialise(model, seed)
