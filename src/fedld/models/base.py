"""What every model offers: `embed` (pooled features) and `head` (linear); logits are head(embed(x))."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Norm = Literal["batch", "group"]
NormLayer = Callable[[int], nn.Module]


class Model(nn.Module, ABC):
    """A classifier in two parts.

    The feature function is called `embed` in every model, not `features`: torchvision names the trunk of
    MobileNetV2 and VGG `features`, and its parameter names are kept so that public weights load.
    """

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Pooled features (N, F) of images (N, channels, H, W)."""

    @property
    @abstractmethod
    def head(self) -> nn.Linear:
        """The linear layer from features to logits."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, classes)."""
        logits: Tensor = self.head(self.embed(x))
        return logits


def norm_layer(norm: Norm) -> NormLayer:
    """Constructor of the normalisation after a convolution; all our widths are multiples of 8 groups."""
    return nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(8, channels)


def head_names(model: Model) -> list[str]:
    """Names of the head's parameters, in the model's order.

    >>> from fedld.models import build
    >>> head_names(build("mobilenet_v2", classes=2, image_size=32, seed=0))
    ['classifier.1.weight', 'classifier.1.bias']
    """
    head = {id(parameter) for parameter in model.head.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in head]


def batchnorm_names(model: nn.Module) -> set[str]:
    """Names of all parameters and buffers of BatchNorm modules, found by type, as names do not tell."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module.state_dict()
    }
