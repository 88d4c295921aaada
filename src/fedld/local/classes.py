"""Weights of classes: how often a client draws the samples of a class, or how much they count in its loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedld.errors import FedLDError, nearest

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
    """Weights by class from `covid=3,normal=1`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.rpartition("="))
        if name not in classes:
            raise FedLDError(
                "class_weights is none, balanced or CLASS=WEIGHT,..., and there is no class "
                f"'{name or part}': {nearest(name or part, list(classes))}"
            )
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = float("nan")
        if not 0 <= found[name] <= LARGEST:
            raise FedLDError(
                f"the weight of class '{name}' is a number from 0 to {LARGEST:g}, not '{number}'"
            )
    return found
