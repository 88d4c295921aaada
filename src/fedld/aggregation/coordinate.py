"""Rules that look at each coordinate by itself and therefore cannot be written with a Gram matrix."""

from dataclasses import dataclass

import torch

from fedld.aggregation.rule import CoordinateRule, check_number, register
from fedld.errors import FedLDError

MAD_TO_SIGMA = 1.4826  # the median absolute deviation of a normal distribution is sigma / 1.4826


@register("median")
@dataclass(frozen=True)
class Median(CoordinateRule):
    """Coordinate-wise weighted median (Yin et al. 2018); halfway between two where weights split evenly."""

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Median of each column."""
        return weighted_median(block, p)


@register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(CoordinateRule):
    """Coordinate-wise average without the `trim` smallest and largest values (fraction of m, or count)."""

    trim: float | int = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.trim, int):
            check_number(self, "trim", 0)
        else:
            check_number(self, "trim", 0, 0.5)

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Weighted mean of what is left."""
        m = block.shape[0]
        cut = self.trim if isinstance(self.trim, int) else min(int(self.trim * m + 1e-9), (m - 1) // 2)
        if m <= 2 * cut:
            raise FedLDError(f"trimmed-mean: trim = {self.trim} leaves nothing of {m} clients")
        values, order = torch.sort(block, dim=0)
        values, weights = values[cut : m - cut], p.to(block.dtype)[order[cut : m - cut]]
        return (values * weights).sum(dim=0) / weights.sum(dim=0)


@register("outlier-pruned")
@dataclass(frozen=True)
class OutlierPruned(CoordinateRule):
    """RobFedAvg: coordinate-wise average without values further than `k` robust deviations from the median.

    The paper's threshold is not public; ours is the median absolute deviation, scaled to a normal sigma.
    """

    k: float = 3.0

    def __post_init__(self) -> None:
        check_number(self, "k", 0, open_low=True)

    def __call__(self, block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Weighted mean of what is left (never nothing: some client is at most one deviation away)."""
        offsets = block - weighted_median(block, p)
        deviation = weighted_median(offsets.abs(), p)
        weights = p.to(block.dtype)[:, None] * (offsets.abs() <= self.k * MAD_TO_SIGMA * deviation)
        return (block * weights).sum(dim=0) / weights.sum(dim=0)


def weighted_median(block: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Median of each column: the middle of the values at which the sorted weights pass one half.

    >>> weighted_median(torch.tensor([[1.0], [2.0], [9.0], [4.0]]), torch.full((4,), 0.25))
    tensor([3.])
    """
    values, order = torch.sort(block, dim=0)
    below = torch.cumsum(p.double()[order], dim=0)  # float64 sums show an even split
    low = (below < 0.5 - 1e-9).sum(dim=0, keepdim=True)
    high = (below < 0.5 + 1e-9).sum(dim=0, keepdim=True).clamp(max=len(p) - 1)
    return ((values.gather(0, low) + values.gather(0, high)) / 2)[0]
