"""Rules against outlying clients: by distances and angles of updates, or coordinate by coordinate.

Distances and angles follow from the Gram matrix. Rules that look at each coordinate by itself cannot be
written with one.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedld.aggregation.inputs import MAD_TO_SIGMA
from fedld.aggregation.rule import (
    NO_EXTRAS,
    Array,
    CoordinateRule,
    Extras,
    GramRule,
    Robust,
    check_number,
    register,
)
from fedld.errors import FedLDError


def capped(p: Array, most: float) -> Array:
    """Give weights of at most `most` each (but at least 1/m, which all can have); the others share the rest.

    >>> capped(np.array([0.8, 0.1, 0.05, 0.05]), 0.4).round(2).tolist()
    [0.4, 0.3, 0.15, 0.15]
    """
    most, p = max(most, 1 / len(p)), p.copy()
    full = np.zeros(len(p), dtype=bool)
    while (p > most * (1 + 1e-12)).any():
        full |= p > most
        p[full] = most
        p[~full] *= (1 - most * full.sum()) / p[~full].sum() if not full.all() else 1.0
    return p


def weighted_mean(values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compute the mean of each column, in float64."""
    return (p.double() @ values.double()).to(values.dtype)


def weighted_median(values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compute the median of each column: the middle of the values at which the sorted weights pass one half.

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
        """Compute the median of each column."""
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
        """Compute the weighted mean of what is left."""
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
        """Compute the weighted mean of what is left (some client is at most one deviation away)."""
        alike = torch.full_like(p, 1 / len(p))
        offsets = block - weighted_median(block, alike)
        deviation = weighted_median(offsets.abs(), alike)
        weights = p.to(block.dtype)[:, None] * (offsets.abs() <= self.k * MAD_TO_SIGMA * deviation)
        return (block * weights).sum(dim=0) / weights.sum(dim=0)


def squared_distances(K: Array, c: Array) -> Array:
    """Compute |g_i - G c|^2 of every client."""
    Kc = K @ c
    return np.maximum(np.diagonal(K) - 2 * Kc + c @ Kc, 0.0)


def within(K: Array, c: Array, radius: float) -> Array:
    """Give factors that bring every g_i - G c to at most the radius."""
    distances = np.sqrt(squared_distances(K, c))
    return np.divide(radius, distances, out=np.ones_like(distances), where=distances > radius)


@register("norm-clip")
@dataclass(frozen=True)
class NormClip(Robust, GramRule):
    """The average of updates shortened to at most `bound`, or to their median length if none is given."""

    bound: float | None = None

    def __post_init__(self) -> None:
        if self.bound is not None:
            check_number(self, "bound", 0, open_low=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Compute c_i = p_i min(1, bound / |g_i|)."""
        bound = float(np.median(np.sqrt(np.diagonal(K)))) if self.bound is None else self.bound
        return p * within(K, np.zeros_like(p), bound)


@register("centered-clip")
@dataclass(frozen=True)
class CenteredClip(Robust, GramRule):
    """Centred clipping (Karimireddy et al. 2021), started at zero: v += sum p_i clip(g_i - v, radius).

    The radius is the updates' median length if none is given.
    """

    radius: float | None = None
    iterations: int = 3

    def __post_init__(self) -> None:
        check_number(self, "iterations", 1, whole=True)
        if self.radius is not None:
            check_number(self, "radius", 0, open_low=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give the same steps on the coefficients of v."""
        radius = float(np.median(np.sqrt(np.diagonal(K)))) if self.radius is None else self.radius
        c = np.zeros_like(p)
        for _ in range(self.iterations):
            steps = p * within(K, c, radius)
            c = c + steps - steps.sum() * c
        return c


@register("geometric-median")
@dataclass(frozen=True)
class GeometricMedian(Robust, GramRule):
    """RFA (Pillutla et al. 2022): smoothed Weiszfeld steps to min_v sum p_i |g_i - v|.

    Updates longer than `clip` times the median length are shortened to that first: the steps start at the
    average, and from one that is 1e7 away they would not return. `smoothing` is relative to the root mean
    square of the lengths. Steps stop when the objective falls by less than `tolerance`, relatively.
    """

    clip: float = 10.0
    iterations: int = 100
    smoothing: float = 1e-6
    tolerance: float = 1e-10

    def __post_init__(self) -> None:
        check_number(self, "clip", 1)
        check_number(self, "iterations", 1, whole=True)
        check_number(self, "smoothing", 0, open_low=True)
        check_number(self, "tolerance", 0)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give weights p_i / max(smoothing, |g_i - v|), normalised, again and again."""
        clipped = within(K, np.zeros_like(p), self.clip * float(np.median(np.sqrt(np.diagonal(K)))))
        K = clipped[:, None] * K * clipped
        floor = self.smoothing * np.sqrt(np.trace(K) / len(K))
        c, before = p.copy(), np.inf
        for _ in range(self.iterations):
            distances = np.sqrt(squared_distances(K, c))
            cost = float(p @ distances)
            if cost == 0 or before - cost < self.tolerance * cost:
                break
            c, before = weiszfeld(p, distances, floor), cost
        return clipped * c


def weiszfeld(p: Array, distances: Array, floor: float) -> Array:
    """Take one step: p_i / max(floor, distance_i), normalised."""
    near = p / np.maximum(distances, floor)
    return np.asarray(near / near.sum())


@dataclass(frozen=True)
class _Krum(Robust, GramRule):
    byzantine: int | None = None

    def __post_init__(self) -> None:
        if self.byzantine is not None:
            check_number(self, "byzantine", 0, whole=True)

    def ranking(self, K: Array) -> list[int]:
        """Give clients by the sum of squared distances to their m - f - 2 nearest others, smallest first."""
        m = len(K)
        f = self.faulty(m)
        squares = np.diagonal(K)
        distances = np.maximum(squares[:, None] + squares - 2 * K, 0.0)
        np.fill_diagonal(distances, np.inf)
        scores = np.sort(distances, axis=1)[:, : max(0, m - f - 2)].sum(axis=1)
        return [int(i) for i in np.argsort(scores, kind="stable")]

    def faulty(self, m: int) -> int:
        """Give the number f of faulty clients: as set, or as many as the proof (m >= 2f + 3) allows."""
        if self.byzantine is None:
            return max(0, (m - 3) // 2)
        if m < self.byzantine + 3:
            raise FedLDError(f"{self.name}: byzantine = {self.byzantine} needs more clients than {m}")
        return self.byzantine


@register("krum")
@dataclass(frozen=True)
class Krum(_Krum):
    """Krum (Blanchard et al. 2017): the one update that is nearest to its m - f - 2 nearest others."""

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give all weight on the winner."""
        return np.asarray(np.eye(len(p))[self.ranking(K)[0]])


@register("multi-krum")
@dataclass(frozen=True)
class MultiKrum(_Krum):
    """The p-weighted average of the `select` best updates by Krum's score (m - f of them if not given)."""

    select: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select is not None:
            check_number(self, "select", 1, whole=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give weights of the selected, renormalised."""
        count = self.select or len(p) - self.faulty(len(p))
        chosen = np.zeros_like(p)
        chosen[self.ranking(K)[:count]] = 1.0
        return p * chosen / (p @ chosen)


@register("cosine-filter")
@dataclass(frozen=True)
class CosineFilter(Robust, GramRule):
    """The average without clients at a cosine below `threshold` with the clients' common direction.

    The direction is the mean of the updates at unit length, h = sum p_i g_i / |g_i|, so that a long update
    has no more to say about it than a short one. At threshold 0 somebody always passes, since
    <h, h> = sum p_i <g_i, h> / |g_i|; if no client passes a higher one, the average stays as it is.
    """

    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_number(self, "threshold", -1, 1)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give weights of those that pass, renormalised."""
        norms = np.sqrt(np.diagonal(K))
        unit = np.divide(p, norms, out=np.zeros_like(p), where=norms > 0)
        along = K @ unit
        lengths = norms * np.sqrt(max(float(unit @ along), 0.0))
        passed = p * (along >= self.threshold * lengths)
        return passed / passed.sum() if passed.sum() > 0 else p.copy()
