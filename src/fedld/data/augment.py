"""Augmentation of whole batches: random resized crop, rotation and horizontal flip as one resampling.

The three compose to one affine map a picture, so pixels are interpolated once. Ranges and order are those of
the published training transforms (crop, rotate, flip).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

TRIES = 10  # crops drawn until one fits, as the usual random resized crop does; then the whole picture


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random transform.

    scale: area of the crop as a share of the picture; crops that do not fit are drawn again.
    ratio: width over height of the crop, log-uniform.
    degrees: largest rotation either way.
    flip: probability of a horizontal flip.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> AUGMENTATIONS["none"](images, torch.Generator()) is images
    True
    """

    scale: tuple[float, float] = (1.0, 1.0)
    ratio: tuple[float, float] = (1.0, 1.0)
    degrees: float = 0.0
    flip: float = 0.0

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Transform each picture of a float batch (N, C, H, W) by its own draw; size and layout stay.

        Where a rotation looks beyond the picture the result is 0: black before normalisation, the mean colour
        after it.
        """
        if self == Augmentation():
            return images
        affine = self.draw(len(images), generator, images.shape[-1] / images.shape[-2]).to(images)
        grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
        # Zero padding would also dim the outermost pixels of a crop at the border: replicate, then blank.
        result = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
        result = result * (grid.abs() <= 1).all(dim=-1)[:, None]
        channels_last = images.is_contiguous(memory_format=torch.channels_last)
        return result.contiguous(
            memory_format=torch.channels_last if channels_last else torch.contiguous_format
        )

    def draw(self, count: int, generator: torch.Generator, aspect: float = 1.0) -> Tensor:
        """Affine maps (count, 2, 3) from output to input coordinates, both in [-1, 1]; `aspect` is W / H."""
        width, height, x, y = self._crop(count, generator, aspect)
        uniform = torch.rand(2, count, generator=generator)
        angle = (2 * uniform[0] - 1) * math.radians(self.degrees)
        mirror = 1 - 2 * (uniform[1] < self.flip).float()
        # Output pixel -> undo the flip -> undo the rotation (in square pixels) -> place in the crop.
        cos, sin = angle.cos(), angle.sin()
        return torch.stack(
            [
                torch.stack([width * cos * mirror, -width * sin / aspect, x], 1),
                torch.stack([height * sin * mirror * aspect, height * cos, y], 1),
            ],
            1,
        )

    def _crop(self, count: int, generator: torch.Generator, aspect: float) -> tuple[Tensor, ...]:
        """Half width, half height and centre of each crop, where the picture spans [-1, 1]."""
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


AUGMENTATIONS = {
    "none": Augmentation(),
    "retina": Augmentation(scale=(0.6, 1.0), ratio=(3 / 4, 4 / 3), degrees=10, flip=0.5),
    "covid-fl": Augmentation(scale=(0.8, 1.2), ratio=(3 / 4, 4 / 3), degrees=10, flip=0.5),
}
