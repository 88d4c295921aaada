"""A client's samples as batches, the weights of their classes, and their features.

uint8 pixels are indexed, converted and normalised batch by batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.errors import FedLDError, nearest
from fedld.layout import FlatModel
from fedld.models import as_model

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
        """Give normalised images and labels of some samples."""
        at = self._positions[which.numpy() if isinstance(which, Tensor) else which]
        pixels = torch.from_numpy(self._images[at]).permute(0, 3, 1, 2).to(self._device)
        images = pixels.float().sub_(self._mean).mul_(self._scale)
        return images, _batch_targets(self.labels[which]).to(self._device)

    def shuffled(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Iterate over one epoch in random order.

        A last batch of one sample joins the one before it: BatchNorm has no variance for a single value.
        """
        yield from self._parts(torch.randperm(len(self), generator=generator), size)

    def drawn(self, size: int, weights: Tensor, generator: torch.Generator) -> Iterator[Batch]:
        """Give as many samples as there are, drawn with replacement in proportion to their weights."""
        yield from self._parts(torch.multinomial(weights, len(self), True, generator=generator), size)

    def _parts(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Iterate over batches of the samples in an order; no batch of one sample follows another."""
        parts = list(torch.split(order, size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        for part in parts:
            yield self.batch(part)

    def in_order(self, size: int) -> Iterator[Batch]:
        """Iterate over every sample once, in order."""
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
        """Compute the features and labels of some samples."""
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
        """Give standardised features and targets of some samples."""
        features, targets = super().batch(which)
        return ((features - self._mean) * self._scale).nan_to_num(0.0), targets


def _targets(values: NDArray[np.generic]) -> Tensor:
    """Give class numbers as int64, masks as they are stored, other targets as float32."""
    if values.ndim == 3 and values.dtype == np.uint8:
        return torch.from_numpy(np.array(values))
    kind = np.int64 if values.dtype.kind in "iub" else np.float32
    return torch.from_numpy(np.array(values, dtype=kind))


def _batch_targets(targets: Tensor) -> Tensor:
    """Give masks of a batch as class numbers; other targets as they are."""
    return targets.long() if targets.dtype == torch.uint8 else targets


BALANCED = "balanced"
LARGEST = 1e6


@dataclass(frozen=True)
class ClassWeights:
    """What each class weighs at every client.

    Args:
        weights: one for each class.
        balanced: divide them by the client's own numbers of samples.
        applied: to the "loss" of samples, or to the chance that "sampling" draws them.
    """

    weights: tuple[float, ...]
    balanced: bool = False
    applied: Literal["loss", "sampling"] = "loss"

    def of(self, labels: Tensor, smallest: int = 1) -> Tensor:
        """Give the weights of all classes at one client; their mean over its samples is 1.

        A class with fewer than `smallest` samples weighs no more than any other: a site does not let single
        samples stand out in its update.

        Args:
            labels: classes of the client's training samples.
            smallest: number of samples from which on a class is weighed up.

        Returns:
            Weights (classes,).

        >>> ClassWeights((1.0, 1.0), balanced=True).of(torch.tensor([0, 0, 0, 1]))
        tensor([0.6667, 2.0000])
        """
        weights = torch.tensor(self.weights)
        counts = torch.bincount(labels, minlength=len(weights)).float()
        if self.balanced:
            weights = weights / counts.clamp(min=1)
        many = counts >= max(smallest, 1)
        if not bool(many.any()):
            return torch.ones_like(weights)
        weights = torch.where(many, weights, weights.clamp(max=weights[many].min().item()))
        mean = (weights * counts).sum() / counts.sum()
        return weights / mean if mean > 0 else torch.ones_like(weights)


def parse_class_weights(
    text: str, classes: Sequence[str], applied: Literal["loss", "sampling"]
) -> ClassWeights | None:
    """Read the setting `class_weights`.

    Args:
        text: "none", "balanced", or weights by the names of classes: "covid=3,normal=1"; others weigh 1.
        classes: the names.
        applied: to loss or sampling.

    Returns:
        The weights, None for "none".

    Raises:
        FedLDError: no such class, or no positive number.

    >>> parse_class_weights("b=3", ["a", "b"], "loss").weights
    (1.0, 3.0)
    """
    if text == "none":
        return None
    if text == BALANCED:
        return ClassWeights((1.0,) * len(classes), balanced=True, applied=applied)
    given = _by_name(text, classes)
    return ClassWeights(tuple(given.get(name, 1.0) for name in classes), applied=applied)


def _by_name(text: str, classes: Sequence[str]) -> Mapping[str, float]:
    """Give weights by class from `covid=3,normal=1`."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.rpartition("="))
        if name not in classes:
            raise FedLDError(
                "class_weights is none, balanced or CLASS=WEIGHT,..., and there is no class "
                f"'{name or part}': {nearest(name or part, list(classes))}"
            )
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = float("nan")
        if not 0 <= weights[name] <= LARGEST:
            raise FedLDError(
                f"the weight of class '{name}' is a number from 0 to {LARGEST:g}, not '{number}'"
            )
    return weights


BATCH = 256


class Embedding:
    """Remembers the features of some samples under one model; with any other weights they are computed anew.

    A method that reads features (FedPAC) asks for those of the incoming and of the trained model, and so does
    whoever measures the losses of these two models.
    """

    def __init__(self) -> None:
        self._weights: Tensor | None = None
        self._batches: list[Batch] = []

    @torch.no_grad()
    def batches(self, flat: FlatModel, samples: Samples) -> list[Batch]:
        """Compute the features and labels of all samples in order, in eval mode, without augmentation."""
        if self._weights is None or not torch.equal(self._weights, flat.vector):
            model = as_model(flat.model)
            model.eval()
            self._batches = [(model.embed(images), labels) for images, labels in samples.in_order(BATCH)]
            self._weights = flat.vector.clone()
        return self._batches
