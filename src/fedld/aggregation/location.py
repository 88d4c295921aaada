"""Where some clients' numbers lie: weights that no client can take over, and a median that follows them."""

import numpy as np
import torch

from fedld.aggregation.rule import Array


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
