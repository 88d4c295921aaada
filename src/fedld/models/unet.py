"""U-Net (Ronneberger et al. 2015): logits for every pixel; width, depth and normalisation are options.

`unet` has 8 channels at full size and 3 halvings; `unet:width=16,depth=4,norm=batch` says otherwise.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.errors import FedLDError, nearest, unknown_name
from fedld.models.base import Norm, NormLayer, norm_layer
from fedld.models.build import initialise

NAME = "unet"
WIDEST = 256
DEEPEST = 6


@dataclass(frozen=True)
class UNetOptions:
    """Options of a U-Net: channels at full size (a multiple of 8), number of halvings, normalisation."""

    width: int = 8
    depth: int = 3
    norm: Norm = "group"


class UNet(nn.Module):
    """Two convolutions at every size on the way down and on the way up; skip connections at equal sizes.

    Pictures of any size fit: what comes from below is scaled to the size of the skip connection.
    """

    def __init__(self, channels: int, classes: int, width: int, depth: int, norm: NormLayer) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth + 1)]
        self.down = nn.ModuleList()
        for inputs, outputs in zip([channels, *widths], widths, strict=False):
            self.down.append(_two_convolutions(inputs, outputs, norm))
        self.up = nn.ModuleList()
        for k in reversed(range(depth)):
            self.up.append(_two_convolutions(widths[k + 1] + widths[k], widths[k], norm))
        self.pixels = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (N, classes, H, W) of images (N, channels, H, W)."""
        skips = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([F.interpolate(x, skip.shape[-2:]), skip], 1))
        logits: Tensor = self.pixels(x)
        return logits


def _two_convolutions(inputs: int, outputs: int, norm: NormLayer) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3, padding=1, bias=False), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def is_unet(name: str) -> bool:
    """Tell whether a model's name is that of a U-Net.

    >>> is_unet("unet:width=16"), is_unet("resnet8")
    (True, False)
    """
    return name.partition(":")[0] == NAME


def unet_options(name: str) -> UNetOptions:
    """Read the options of a name.

    Args:
        name: "unet", or with options "unet:width=16,depth=2,norm=batch".

    Raises:
        FedLDError: there is no such option, or it has no such value.

    >>> unet_options("unet:width=16,norm=batch")
    UNetOptions(width=16, depth=3, norm='batch')
    """
    typed: dict[str, Any] = {}
    for part in filter(None, name.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        names = list(vars(UNetOptions()))
        if key not in names:
            raise FedLDError(f"model '{name}' has no option '{key}': {nearest(key, names)}")
        typed[key] = value if key == "norm" else int(value) if value.isdecimal() else 0
    options = UNetOptions(**typed)
    if options.norm not in ("batch", "group"):
        raise unknown_name("norm", options.norm, ["batch", "group"])
    if options.width % 8 or not 8 <= options.width <= WIDEST:
        raise FedLDError(f"model '{name}': width is a multiple of 8 up to {WIDEST}")
    if not 1 <= options.depth <= DEEPEST:
        raise FedLDError(f"model '{name}': depth lies between 1 and {DEEPEST}")
    return options


def outline_unet(name: str, classes: int, channels: int) -> UNet:
    """Give a U-Net without weights, on torch's device "meta"."""
    options = unet_options(name)
    with torch.device("meta"):
        return UNet(channels, classes, options.width, options.depth, norm=norm_layer(options.norm))


def build_unet(name: str, *, classes: int, input_shape: tuple[int, ...], seed: int) -> UNet:
    """Build a U-Net for pictures (channels, H, W); the seed decides its weights.

    >>> network = build_unet("unet:depth=2", classes=3, input_shape=(1, 20, 30), seed=0)
    >>> network(torch.zeros(1, 1, 20, 30)).shape
    torch.Size([1, 3, 20, 30])

    Raises:
        FedLDError: the pictures are too small for the depth.
    """
    options = unet_options(name)
    channels, height, width = input_shape
    if min(height, width) < 2**options.depth:
        raise FedLDError(
            f"model '{name}' halves pictures {options.depth} times: {height} x {width} is too small"
        )
    model = outline_unet(name, classes, channels)
    empty = {key: torch.empty(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    return initialise(model, seed)
