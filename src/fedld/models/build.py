"""From a name and a seed to an initialised model."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.errors import FedLDError, unknown_name
from fedld.models.base import Block, Model, Norm, head_layers, norm_layer
from fedld.models.networks import (
    CNN,
    VGG9,
    BasicBlock,
    Bottleneck,
    EfficientNetLite0,
    MobileNetV2,
    PlainCNN,
    ResNet,
)
from fedld.seeds import torch_generator

Module = TypeVar("Module", bound=nn.Module)

MIN_IMAGE_SIZE = 8
MAX_HIDDEN = 65536

_PLAIN: dict[str, Callable[..., Model]] = {
    "cnn": lambda **shape: PlainCNN(CNN, (128,), **shape),
    "vgg9": lambda **shape: PlainCNN(VGG9, (512, 512), **shape),
}
_NORMALISED: dict[str, Callable[..., Model]] = {
    "resnet8": lambda **shape: ResNet(BasicBlock, (1, 1, 1), width=16, small_stem=True, **shape),
    "resnet18": lambda **shape: ResNet(BasicBlock, (2, 2, 2, 2), width=64, small_stem=False, **shape),
    "resnet50": lambda **shape: ResNet(Bottleneck, (3, 4, 6, 3), width=64, small_stem=False, **shape),
    "mobilenet_v2": MobileNetV2,
    "efficientnet_lite0": EfficientNetLite0,
}
GROUP_NORM, STANDARDISED = "-gn", "-gnws"  # GroupNorm, with weight standardisation
NAMES = (*_PLAIN, *_NORMALISED, f"resnet8{GROUP_NORM}", f"resnet8{STANDARDISED}")


def build(
    name: str,
    *,
    classes: int,
    image_size: int,
    seed: int,
    channels: int = 3,
    norm: Norm = "batch",
    head: str = "linear",
) -> Model:
    """Build model `name` (one of `NAMES`) for images of `image_size` pixels; `head` is "linear" or "mlp:64".

    The same seed gives the same weights, and the global generator is neither read nor moved: the model is
    made without storage (meta device), then each layer is filled from a generator derived from (seed, its
    name). So two models of one seed that differ only in their head share every other weight.

    >>> model = build("cnn", classes=3, image_size=28, channels=1, seed=0)
    >>> model(torch.zeros(2, 1, 28, 28)).shape, model.embed(torch.zeros(2, 1, 28, 28)).shape
    (torch.Size([2, 3]), torch.Size([2, 128]))
    """
    _check(name, classes, image_size, channels, norm=norm)
    model = outline(name, classes, image_size, channels, norm=norm, hidden=hidden_units(head))
    # Not `to_empty`: it imports sympy, half a second in every process.
    empty = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    return initialise(model, seed)


def outline(
    name: str, classes: int, image_size: int, channels: int = 3, norm: Norm = "batch", hidden: int = 0
) -> Model:
    """Build model `name` without storage: names and shapes."""
    with torch.device("meta"):
        if name in _PLAIN:
            return _PLAIN[name](classes=classes, channels=channels, image_size=image_size, hidden=hidden)
        kind, dash, suffix = name.partition("-")
        layer = norm_layer("group" if dash else norm)
        model = _NORMALISED[kind](classes=classes, channels=channels, norm=layer, hidden=hidden)
        if dash + suffix == STANDARDISED:
            standardise(model)
        return model


def initialise(model: Module, seed: int) -> Module:
    """Draw He normal convolutions (fan out, as torchvision), small uniform linear layers, unit norms."""
    for name, module in model.named_modules():
        generator = torch_generator(seed, "init", name)
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            module.reset_parameters()
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def hidden_units(head: str) -> int:
    """Count the units of the head's hidden layer, 0 where it is linear.

    >>> hidden_units("linear"), hidden_units("mlp:64")
    (0, 64)
    """
    kind, _, units = head.partition(":")
    if head == "linear":
        return 0
    if kind == "mlp" and units.isdecimal() and 1 <= int(units) <= MAX_HIDDEN:
        return int(units)
    raise FedLDError(f"a head is 'linear' or 'mlp:N' with N hidden units, such as 'mlp:64', not '{head}'")


def _check(name: str, classes: int, image_size: int, channels: int, norm: str) -> None:
    if name not in NAMES:
        raise unknown_name("model", name, NAMES)
    if norm not in ("batch", "group"):
        raise unknown_name("norm", norm, ["batch", "group"])
    if name in _PLAIN and norm != "batch":
        raise FedLDError(f"model '{name}' has no normalisation, so norm='{norm}' cannot apply")
    if classes < 1 or channels < 1:
        raise FedLDError(f"a model needs at least 1 output and 1 channel, got {classes} and {channels}")
    if image_size < MIN_IMAGE_SIZE:
        raise FedLDError(f"images of {image_size} pixels are too small, at least {MIN_IMAGE_SIZE} are needed")


VECTOR = "linear"


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


class StandardisedConv2d(nn.Conv2d):
    """A convolution by (w - mean) / deviation of each filter, with an ordinary convolution's parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve with standardised filters."""
        w = self.weight
        mean, variance = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True)
        filters = (w - mean) / (variance + 1e-10).sqrt()
        return F.conv2d(x, filters, self.bias, self.stride, self.padding, self.dilation, self.groups)


def standardise(network: nn.Module) -> None:
    """Put a standardised convolution in the place of every convolution; names and shapes stay."""
    for name, child in network.named_children():
        if type(child) is nn.Conv2d:
            layer = StandardisedConv2d(
                child.in_channels,
                child.out_channels,
                child.kernel_size,  # type: ignore[arg-type]
                child.stride,  # type: ignore[arg-type]
                padding=child.padding,  # type: ignore[arg-type]
                groups=child.groups,
                bias=child.bias is not None,
            )
            setattr(network, name, layer)
        else:
            standardise(child)
