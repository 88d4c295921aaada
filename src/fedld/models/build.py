"""From a name and a seed to an initialised model."""

from collections.abc import Callable

import torch
from torch import nn

from fedld.errors import FedLDError, nearest
from fedld.models.base import Model, Norm, norm_layer
from fedld.models.mobilenet import MobileNetV2
from fedld.models.plain import CNN, VGG9, PlainCNN
from fedld.models.resnet import BasicBlock, Bottleneck, ResNet
from fedld.seeds import torch_generator

MIN_IMAGE_SIZE = 8

_PLAIN: dict[str, Callable[..., Model]] = {
    "cnn": lambda **shape: PlainCNN(CNN, (128,), **shape),
    "vgg9": lambda **shape: PlainCNN(VGG9, (512, 512), **shape),
}
_NORMALISED: dict[str, Callable[..., Model]] = {
    "resnet8": lambda **shape: ResNet(BasicBlock, (1, 1, 1), width=16, small_stem=True, **shape),
    "resnet18": lambda **shape: ResNet(BasicBlock, (2, 2, 2, 2), width=64, small_stem=False, **shape),
    "resnet50": lambda **shape: ResNet(Bottleneck, (3, 4, 6, 3), width=64, small_stem=False, **shape),
    "mobilenet_v2": MobileNetV2,
}
GROUP_NORM = "-gn"
NAMES = (*_PLAIN, *_NORMALISED, f"resnet8{GROUP_NORM}")


def build(
    name: str, *, classes: int, image_size: int, seed: int, channels: int = 3, norm: Norm = "batch"
) -> Model:
    """Model `name` (one of `NAMES`) for square images of `image_size` pixels.

    The same seed gives the same weights, and the global generator is neither read nor moved: the model is
    made without storage (meta device), then each layer is filled from a generator derived from (seed, its
    name). So two models of one seed that differ only in their head share every other weight.

    >>> model = build("cnn", classes=3, image_size=28, channels=1, seed=0)
    >>> model(torch.zeros(2, 1, 28, 28)).shape, model.embed(torch.zeros(2, 1, 28, 28)).shape
    (torch.Size([2, 3]), torch.Size([2, 128]))
    """
    _check(name, classes, image_size, channels, norm)
    with torch.device("meta"):
        if name in _PLAIN:
            model = _PLAIN[name](classes=classes, channels=channels, image_size=image_size)
        else:
            layer = norm_layer("group" if name.endswith(GROUP_NORM) else norm)
            constructor = _NORMALISED[name.removesuffix(GROUP_NORM)]
            model = constructor(classes=classes, channels=channels, norm=layer)
    # Not `to_empty`: it imports sympy, half a second in every process.
    empty = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    return initialise(model, seed)


def initialise(model: Model, seed: int) -> Model:
    """He normal convolutions (fan out, as torchvision), small uniform linear layers, unit normalisation."""
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


def _check(name: str, classes: int, image_size: int, channels: int, norm: str) -> None:
    if name not in NAMES:
        raise FedLDError(f"unknown model '{name}': {nearest(name, list(NAMES))}")
    if norm not in ("batch", "group"):
        raise FedLDError(f"unknown norm '{norm}': {nearest(norm, ['batch', 'group'])}")
    if name in _PLAIN and norm != "batch":
        raise FedLDError(f"model '{name}' has no normalisation, so norm='{norm}' cannot apply")
    if classes < 2 or channels < 1:
        raise FedLDError(f"a model needs at least 2 classes and 1 channel, got {classes} and {channels}")
    if image_size < MIN_IMAGE_SIZE:
        raise FedLDError(f"images of {image_size} pixels are too small, at least {MIN_IMAGE_SIZE} are needed")
