"""Rules that look at each coordinate by itself and therefore cannot be written with a Gram matrix."""

from dataclasses import dataclass

import numpy as np
import torch

from fedld.aggregation.rule import Array, CoordinateRule, Robust, check_number, register
from fedld.aggregation.screen import MAD_TO_SIGMA
from fedld.errors import FedLDError


def capped(p: Array, most: float) -> Array:
    """Weights of at most `most` each (but at least 1/m, which all can have); the others share the rest.

    >>> capped(np.array([0.8, 0.1, 0.05, 0.05]), 0.4).round(2).tolist()
    [0.4, 0.3, 0.15, 0.15]
    """
    most, p = max(most, 1 / len(p)), p.copy()
    held = np.zeros(len(p), dtype=bool)
    while (p > most * (1 + 1e-12)).any():
        held |= p > most
        p[held] = most
        p[~held] *= (1 - most * held.sum()) / p[~held].sum() if not held.all() else 1.0
    return p


def weighted_mean(values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mean of each column, in float64."""
    return (p.double() @ values.double()).to(values.dtype)


def weighted_median(values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Median of each column: the middle of the values at which the sorted weights pass one half.

    >>> weighted_median(torch.tensor([[1.0], [2.0], [9.0], [4.0]]), torch.full((4,), 0.25))
    tensor([3.])
    """
    ordered, order = torch.sort(values, dim=0)
    below = torch.cumsum(p.double()[order], dim=0)  # float64 sums show an even split
    low = (below < 0.5 - 1e-9).sum(dim=0, keepdim=True)
    high = (below < 0.5 + 1e-9).sum(dim=0, keepdim=True).clamp(max=len(p) - 1)
    return ((ordered.gather(0, low) + ordered.gather(0, high)) / 2)[0]


@register("median")
@dataclass(frozen=True)
class Median(Robust, CoordinateRule):
    """Coordinate-wise weighted median (Yin et al. 2018); halfway between two where weights split evenly."""

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Median of each column."""
        return weighted_median(block, p)


@register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Robust, CoordinateRule):
    """Coordinate-wise average without the `trim` smallest and largest values (fraction of m, or count).

    A fraction above 0 takes away at least one at either end, as soon as there are three clients.
    """

    trim: float | int = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.trim, int):
            check_number(self, "trim", 0)
        else:
            check_number(self, "trim", 0, 0.5)

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Weighted mean of what is left."""
        m = block.shape[0]
        cut = self.trim if isinstance(self.trim, int) else self._count(m)
        if m <= 2 * cut:
            raise FedLDError(f"trimmed-mean: trim = {self.trim} leaves nothing of {m} clients")
        values, order = torch.sort(block, dim=0)
        values, weights = values[cut : m - cut], p.to(block.dtype)[order[cut : m - cut]]
        return (values * weights).sum(dim=0) / weights.sum(dim=0)

    def _count(self, m: int) -> int:
        return min(max(int(self.trim * m + 1e-9), 1 if self.trim > 0 else 0), (m - 1) // 2)


@register("outlier-pruned")
@dataclass(frozen=True)
class OutlierPruned(Robust, CoordinateRule):
    """RobFedAvg: coordinate-wise average without values further than `k` robust deviations from the median.

    The paper's threshold is not public; ours is the median absolute deviation, scaled to a normal sigma.
    Every client counts alike in the median and the deviation, else one that holds more than half of the data
    would be both and prune all others; sizes weigh in the average of what is left.
    """

    k: float = 3.0

    def __post_init__(self) -> None:
        check_number(self, "k", 0, open_low=True)

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Weighted mean of what is left (never nothing: some client is at most one deviation away)."""
        alike = torch.full_like(p, 1 / len(p))
        offsets = block - weighted_median(block, alike)
        deviation = weighted_median(offsets.abs(), alike)
        weights = p.to(block.dtype)[:, None] * (offsets.abs() <= self.k * MAD_TO_SIGMA * deviation)
        return (block * weights).sum(dim=0) / weights.sum(dim=0)
