"""What every model offers: `embed` (pooled features) and `head` (linear); logits are head(embed(x))."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedld.errors import FedLDError

Norm = Literal["batch", "group"]
NormLayer = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Block:
    """A part of the network that is trained or frozen as a whole: its modules in order of computation."""

    name: str
    modules: tuple[str, ...]


class Model(nn.Module):
    """Base of our networks: a chain of blocks; the last one is the head and ends in a linear layer.

    The feature function is called `embed` in every model, not `features`: torchvision names the trunk of
    MobileNetV2 and VGG `features`, and its parameter names are kept so that public weights load.

    Attributes:
        blocks: the parts that are trained or frozen as a whole, in order of computation.
        trunk: a frozen network before this one, if there is one.

    >>> import torch
    >>> from fedld.models import build
    >>> network = build("cnn", classes=2, image_size=28, seed=0)
    >>> network.embed(torch.zeros(1, 3, 28, 28)).shape[1] == network.head.in_features
    True
    """

    blocks: tuple[Block, ...]
    trunk: Callable[[Tensor], Tensor] | None = None

    def behind(self, trunk: Callable[[Tensor], Tensor]) -> None:
        """Put a frozen trunk before this network; its parameters do not become this model's.

        Args:
            trunk: function from images to the input of the first block.
        """
        object.__setattr__(self, "trunk", trunk)  # nn.Module would register it

    @property
    def head(self) -> nn.Linear:
        """The linear layer from features to logits."""
        head = self.get_submodule(self.blocks[-1].modules[-1])
        assert isinstance(head, nn.Linear)
        return head

    def embed(self, x: Tensor) -> Tensor:
        """Compute features, the input of the last linear layer.

        Args:
            x: images (N, channels, H, W), or what the trunk takes.

        Returns:
            Features (N, F).
        """
        x = x if self.trunk is None else self.trunk(x)
        for name in [name for block in self.blocks for name in block.modules][:-1]:
            x = self.get_submodule(name)(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits.

        Args:
            x: images (N, channels, H, W), or what the trunk takes.

        Returns:
            Logits (N, classes).
        """
        logits: Tensor = self.head(self.embed(x))
        return logits


def head_layers(inputs: int, hidden: int, classes: int) -> list[nn.Module]:
    """Make the head's layers: one linear layer, or with a hidden layer of some units before it."""
    if not hidden:
        return [nn.Linear(inputs, classes)]
    return [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)]


def as_model(network: nn.Module) -> Model:
    """Check that the network has features (`embed`) and a linear `head`; any other is refused."""
    if not isinstance(network, Model):
        raise FedLDError(f"features and a head are needed, which {type(network).__name__} does not have")
    return network


def norm_layer(norm: Norm) -> NormLayer:
    """Choose the normalisation after a convolution; all our widths are multiples of 8 groups."""
    return nn.BatchNorm2d if norm == "batch" else lambda channels: nn.GroupNorm(8, channels)


def head_names(model: Model) -> list[str]:
    """Name the head's parameters, in the model's order.

    >>> from fedld.models import build
    >>> head_names(build("mobilenet_v2", classes=2, image_size=32, seed=0))
    ['classifier.1.weight', 'classifier.1.bias']
    """
    head = {id(parameter) for parameter in model.head.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in head]


def head_block_names(model: Model) -> list[str]:
    """Name all parameters of the last block, in the model's order: the head with its hidden layers."""
    head = {id(p) for name in model.blocks[-1].modules for p in model.get_submodule(name).parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in head]


def beyond_features(network: nn.Module, names: Collection[str]) -> bool:
    """Tell whether there are such parameters and buffers, and none of them has a part in the features.

    >>> from fedld.models import build
    >>> net = build("cnn", classes=2, image_size=28, seed=0)
    >>> beyond_features(net, head_names(net)), beyond_features(net, ["features.0.weight"])
    (True, False)
    """
    if not isinstance(network, Model):
        return False
    body = [name for block in network.blocks for name in block.modules][:-1]
    return bool(names) and not any(f"{name}.".startswith(f"{part}.") for name in names for part in body)


def batchnorm_names(model: nn.Module) -> set[str]:
    """Name all parameters and buffers of BatchNorm modules, found by type."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module.state_dict()
    }
