"""Augmentation of whole batches: named sets, and functions and modules of the user's own.

Random resized crop, rotation and flips compose to one affine map a picture, so pixels are interpolated once.
`retina` and `covid-fl` have the ranges and order of the published training transforms (crop, rotate, flip).
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedld.errors import FedLDError
from fedld.registry import Registry, name_of

TRIES = 10  # crops drawn until one fits, as the usual random resized crop does; then the whole picture


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Ranges of the random transform.

    scale: area of the crop as a share of the picture; crops that do not fit are drawn again.
    ratio: width over height of the crop, log-uniform.
    degrees: largest rotation either way.
    flip, vertical: probability of a horizontal and of a vertical flip.
    brightness: largest shift either way, in standard deviations of a normalised picture.
    contrast, saturation: largest change of the factor on differences from the picture's mean, and from its
        grey; 0.2 is 0.8 to 1.2.
    noise: standard deviation of Gaussian noise.
    erase: probability that a rectangle of 2 to 20 % of the area is set to 0.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> AUGMENTATIONS["none"](images, torch.Generator()) is images
    True
    """

    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    degrees: float = 0.0
    flip: float = 0.0
    vertical: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    noise: float = 0.0
    erase: float = 0.0

    def strengthened(self, strength: float) -> "Augmentation":
        """Widen or narrow the ranges; probabilities of flips stay.

        >>> AUGMENTATIONS["fundus"].strengthened(0.5).degrees
        90.0
        """
        if strength == 1:
            return self
        low = max(0.05, 1 - (1 - self.scale[0]) * strength)
        return replace(
            self,
            scale=(low, self.scale[1]),
            ratio=(self.ratio[0] ** strength, self.ratio[1] ** strength),
            degrees=min(180.0, self.degrees * strength),
            brightness=self.brightness * strength,
            contrast=min(1.0, self.contrast * strength),
            saturation=min(1.0, self.saturation * strength),
            noise=self.noise * strength,
            erase=min(1.0, self.erase * strength),
        )

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Transform each picture of a float batch (N, C, H, W) by its own draw; size and layout stay.

        Where a rotation looks beyond the picture the result is 0: black before normalisation, the mean colour
        after it.
        """
        if self == Augmentation():
            return images
        if images.dim() != 4:
            raise FedLDError(
                f"augment needs pictures (N, C, H, W), not samples of shape {tuple(images.shape[1:])}"
            )
        return self._colours(self._resampled(images, generator), generator)

    def _resampled(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Crop, rotation and flips."""
        affine = self.draw(len(images), generator, images.shape[-1] / images.shape[-2]).to(images)
        grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
        # Zero padding would also dim the outermost pixels of a crop at the border: replicate, then blank.
        result = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
        result = result * (grid.abs() <= 1).all(dim=-1)[:, None]
        channels_last = images.is_contiguous(memory_format=torch.channels_last)
        return result.contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )

    def _colours(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Change saturation, contrast and brightness, add noise, erase a rectangle; 0 draws nothing."""

        def factor(width: float) -> Tensor:
            drawn = 2 * torch.rand(len(images), generator=generator) - 1
            return (width * drawn).to(images)[:, None, None, None]

        if self.saturation and images.shape[1] == 3:
            grey = images.mean(1, keepdim=True)
            images = grey + (images - grey) * (1 + factor(self.saturation))
        if self.contrast:
            mean = images.mean((1, 2, 3), keepdim=True)
            images = mean + (images - mean) * (1 + factor(self.contrast))
        if self.brightness:
            images = images + factor(self.brightness)
        if self.noise:
            images = images + self.noise * torch.randn(images.shape, generator=generator).to(images)
        return images * self._kept(images, generator) if self.erase else images

    def _kept(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Make a mask (N, 1, H, W): 1 where a picture stays and 0 in its erased rectangle."""
        uniform = torch.rand(5, len(images), generator=generator)
        area, ratio = 0.02 + 0.18 * uniform[1], torch.exp((2 * uniform[2] - 1) * math.log(3.0))
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        left, top = uniform[3] * (1 - width), uniform[4] * (1 - height)
        x = (torch.arange(images.shape[-1]) + 0.5) / images.shape[-1]
        y = (torch.arange(images.shape[-2]) + 0.5) / images.shape[-2]
        across = (x >= left[:, None]) & (x < (left + width)[:, None])
        down = (y >= top[:, None]) & (y < (top + height)[:, None])
        inside = down[:, :, None] & across[:, None, :] & (uniform[0] < self.erase)[:, None, None]
        return (~inside)[:, None].to(images)

    def draw(self, count: int, generator: torch.Generator, aspect: float = 1.0) -> Tensor:
        """Draw affine maps (count, 2, 3) from output to input coordinates in [-1, 1]; `aspect` is W / H."""
        width, height, x, y = self._crop(count, generator, aspect)
        uniform = torch.rand(2, count, generator=generator)
        angle = (2 * uniform[0] - 1) * math.radians(self.degrees)
        mirror = 1 - 2 * (uniform[1] < self.flip).float()
        upside = torch.ones(count)
        if self.vertical:
            upside = 1 - 2 * (torch.rand(count, generator=generator) < self.vertical).float()
        # Output pixel -> undo the flip -> undo the rotation (in square pixels) -> place in the crop.
        cos, sin = angle.cos(), angle.sin()
        return torch.stack(
            [
                torch.stack([width * cos * mirror, -width * sin * upside / aspect, x], 1),
                torch.stack([height * sin * mirror * aspect, height * cos * upside, y], 1),
            ],
            1,
        )

    def _crop(self, count: int, generator: torch.Generator, aspect: float) -> tuple[Tensor, ...]:
        """Draw half width, half height and centre of each crop, where the picture spans [-1, 1]."""
        uniform = torch.rand(4, count, TRIES, generator=generator)
        area = self.scale[0] + uniform[0] * (self.scale[1] - self.scale[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + uniform[1] * (high - low)) / aspect
        width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
        fits = (width <= 1) & (height <= 1)
        first = fits.float().argmax(dim=1, keepdim=True)  # the first try that fits
        width, height, across, down = (
            v.gather(1, first)[:, 0] for v in (width, height, uniform[2], uniform[3])
        )
        none = ~fits.any(dim=1)
        width, height = width.masked_fill(none, 1.0), height.masked_fill(none, 1.0)
        return width, height, (1 - width) * (2 * across - 1), (1 - height) * (2 * down - 1)


@dataclass(frozen=True)
class OwnAugmentation:
    """A user's function or module on batches, checked at every call.

    A function gets the batch, and the generator too if it takes two arguments. One that draws from torch's
    global generator is repeatable as well: the training loop seeds that.
    """

    function: Callable[..., Any]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Change the batch by the user's function.

        Raises:
            FedLDError: the function fails, or gives something else than a batch of as many samples.
        """
        name = name_of(self.function)
        try:
            with torch.no_grad():
                two = _takes_generator(self.function)
                result = self.function(images, generator) if two else self.function(images)
        except Exception as error:  # whatever the user's function raises
            raise FedLDError(f"augment '{name}' failed: {type(error).__name__}: {error}") from error
        if not isinstance(result, Tensor) or result.shape[:1] != images.shape[:1]:
            kind = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise FedLDError(f"augment '{name}' gave {kind} for a batch of shape {tuple(images.shape)}")
        return result


def as_augmentation(value: Any) -> OwnAugmentation:
    """Accept a user's augmentation: a function of a batch (and a generator), or a torch module."""
    if not callable(value) or isinstance(value, type):
        raise FedLDError(
            f"augment is a name, a function of a batch of images, or a torch module, not {value!r:.80}"
        )
    return OwnAugmentation(value)


AUGMENTATIONS: Registry[Augmentation] = Registry(
    "augment",
    {
        "none": Augmentation(),
        "retina": Augmentation(scale=(0.6, 1.0), ratio=(3 / 4, 4 / 3), degrees=10, flip=0.5),
        "covid-fl": Augmentation(scale=(0.8, 1.2), ratio=(3 / 4, 4 / 3), degrees=10, flip=0.5),
        "natural": Augmentation(
            scale=(0.5, 1.0),
            ratio=(3 / 4, 4 / 3),
            degrees=10,
            flip=0.5,
            brightness=0.3,
            contrast=0.3,
            saturation=0.3,
            erase=0.25,
        ),
        # The heart is on the left: an X-ray is not mirrored.
        "xray": Augmentation(
            scale=(0.8, 1.0), ratio=(0.9, 1 / 0.9), degrees=7, brightness=0.2, contrast=0.2, noise=0.05
        ),
        # An eye may be looked at from any side.
        "fundus": Augmentation(
            scale=(0.8, 1.0),
            ratio=(0.95, 1 / 0.95),
            degrees=180,
            flip=0.5,
            vertical=0.5,
            brightness=0.2,
            contrast=0.2,
            saturation=0.1,
        ),
    },
    accept=as_augmentation,
)


def _takes_generator(function: Callable[..., Any]) -> bool:
    """Tell whether a function has a second argument; a module gets the batch only."""
    if isinstance(function, nn.Module):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters) >= 2
