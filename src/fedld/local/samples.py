"""A client's samples as batches: uint8 pixels are indexed, converted and normalised batch by batch."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Samples:
    """Some positions of an image array (N, H, W, C), read from the memory map when they are needed.

    Rows are NHWC on disk, so a batch is channels-last without a copy.
    """

    def __init__(
        self,
        images: NDArray[np.uint8],
        labels: NDArray[np.generic],
        positions: NDArray[np.int64],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: str = "cpu",
    ) -> None:
        self._images, self._positions = images, positions
        self.labels = _targets(labels[positions])
        self._mean = torch.tensor(mean, device=device).view(1, -1, 1, 1) * 255
        self._scale = 1 / (torch.tensor(std, device=device).view(1, -1, 1, 1) * 255)
        self._device = device

    def __len__(self) -> int:
        return len(self._positions)

    def batch(self, which: Tensor | slice) -> Batch:
        """Normalised images and labels of some samples."""
        at = self._positions[which.numpy() if isinstance(which, Tensor) else which]
        pixels = torch.from_numpy(self._images[at]).permute(0, 3, 1, 2).to(self._device)
        images = pixels.float().sub_(self._mean).mul_(self._scale)
        return images, _batch_targets(self.labels[which]).to(self._device)

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One epoch in random order.

        A last batch of one sample joins the one before it: BatchNorm has no variance for a single value.
        """
        yield from self._parts(torch.randperm(len(self), generator=generator), size)

    def drawn(self, size: int, weights: Tensor, generator: torch.Generator) -> Iterator[Batch]:
        """Give as many samples as there are, drawn with replacement in proportion to their weights."""
        yield from self._parts(torch.multinomial(weights, len(self), True, generator=generator), size)

    def _parts(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Batches of the samples in an order; no batch of one sample follows another."""
        parts = list(torch.split(order, size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        for part in parts:
            yield self.batch(part)

    def in_order(self, size: int) -> Iterator[Batch]:
        """Every sample once, in order."""
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size))


class FeatureSamples(Samples):
    """Samples that the model gets as they are: what a frozen trunk made of images, or a user's own floats.

    Maps are stored (N, H, W, C), so that a batch of them is channels-last without a copy.
    """

    def __init__(
        self,
        features: NDArray[np.float32],
        labels: NDArray[np.generic],
        positions: NDArray[np.int64],
        device: str = "cpu",
    ) -> None:
        self._features, self._positions, self._device = features, positions, device
        self.labels = _targets(labels[positions])

    def batch(self, which: Tensor | slice) -> Batch:
        """Features and labels of some samples."""
        at = self._positions[which.numpy() if isinstance(which, Tensor) else which]
        features = torch.from_numpy(self._features[at]).to(self._device)
        maps = features.permute(0, 3, 1, 2) if features.ndim == 4 else features
        return maps, _batch_targets(self.labels[which]).to(self._device)


class RowSamples(FeatureSamples):
    """Rows of a table of numbers: standardised; a missing number becomes the mean, which is 0."""

    def __init__(
        self,
        features: NDArray[np.float32],
        labels: NDArray[np.generic],
        positions: NDArray[np.int64],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: str = "cpu",
    ) -> None:
        super().__init__(features, labels, positions, device)
        self._mean = torch.tensor(mean, device=device)
        self._scale = 1 / torch.tensor(std, device=device)

    def batch(self, which: Tensor | slice) -> Batch:
        """Standardised features and targets of some samples."""
        features, targets = super().batch(which)
        return ((features - self._mean) * self._scale).nan_to_num(0.0), targets


def _targets(values: NDArray[np.generic]) -> Tensor:
    """Class numbers as int64, masks as they are stored, other targets as float32."""
    if values.ndim == 3 and values.dtype == np.uint8:
        return torch.from_numpy(np.array(values))
    kind = np.int64 if values.dtype.kind in "iub" else np.float32
    return torch.from_numpy(np.array(values, dtype=kind))


def _batch_targets(targets: Tensor) -> Tensor:
    """Masks of a batch as class numbers; other targets as they are."""
    return targets.long() if targets.dtype == torch.uint8 else targets
