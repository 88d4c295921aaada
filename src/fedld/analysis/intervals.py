"""How sure a result on few test pictures is: intervals for accuracy, AUROC and sensitivity.

Pictures of one patient tell less than as many of different patients. Where patients are known, `groups` names
the patient of each picture, and what varies is the patient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads scipy.special on first use: a third of a second
from numpy.typing import ArrayLike, NDArray

from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Names = Sequence[str] | NDArray[Any]
Groups = Names | None
DRAWS = 1000
CHUNK = 1 << 22  # numbers of a bootstrap that are in memory at once


@dataclass(frozen=True)
class Estimate:
    """A value and its interval; either is None where the pictures do not allow it."""

    value: float | None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def accuracy_interval(right: ArrayLike, groups: Groups = None, confidence: float = 0.95) -> Estimate:
    """Compute Wilson's score interval (1927) of the share of right answers.

    All p with |share - p| <= z sqrt(p (1 - p) / n). A percentile bootstrap of n right answers out of n is
    the single point 1, however small n is; this is not. With patients n is the effective number of pictures,
    share (1 - share) / variance of the mean over patients, or their number where the share is 0 or 1.

    >>> print(accuracy_interval([True] * 9 + [False]))
    0.900 [0.596, 0.982]
    """
    hits = np.asarray(right, dtype=np.float64)
    if not len(hits):
        return Estimate(None)
    share = float(hits.mean())
    n = _effective(hits - share, share * (1 - share), groups)
    z2 = float(scipy.special.ndtri((1 + confidence) / 2)) ** 2
    centre, half = share + z2 / (2 * n), (z2 * (share * (1 - share) / n + z2 / (4 * n * n))) ** 0.5
    low, high = ((centre + sign * half) / (1 + z2 / n) for sign in (-1, 1))
    return Estimate(share, min(max(low, 0.0), share), max(min(high, 1.0), share))


def _effective(deviations: Floats, spread: float, groups: Groups) -> float:
    """Number of independent pictures that would be as sure; never more than there are."""
    n = len(deviations)
    if groups is None:
        return float(n)
    sums = _by_group(deviations, groups)
    variance = float((sums**2).sum()) / n**2 * len(sums) / max(len(sums) - 1, 1)
    return min(float(n), spread / variance if variance > 0 else float(len(sums)))


def mean_interval(values: ArrayLike, groups: Groups = None, confidence: float = 0.95) -> Estimate:
    """Give the mean of a measure over cases, with Student's interval.

    Args:
        values: of every case, such as its Dice coefficient.
        groups: patient of each case; deviations are summed over a patient's cases before they are squared.
        confidence: share of intervals that hold the true mean.

    Returns:
        The mean and its interval; no interval of fewer than two cases or patients. Nothing with a nan.

    >>> print(mean_interval([0.8, 0.9, 0.7, 0.8]))
    0.800 [0.670, 0.930]
    """
    numbers = np.asarray(values, dtype=np.float64)
    if not len(numbers) or not np.isfinite(numbers).all():
        return Estimate(None)
    mean = float(numbers.mean())
    deviations = numbers - mean if groups is None else _by_group(numbers - mean, groups)
    units = len(deviations)
    if units < 2:
        return Estimate(mean)
    error = float(np.sqrt((deviations**2).sum() * units / (units - 1))) / len(numbers)
    half = float(scipy.special.stdtrit(units - 1, (1 + confidence) / 2)) * error
    return Estimate(mean, mean - half, mean + half)


def auroc_interval(
    scores: ArrayLike, labels: ArrayLike, groups: Groups = None, confidence: float = 0.95
) -> Estimate:
    """Average the AUROC of each class that occurs against the rest, with DeLong's interval.

    `scores` are (N, C). With the placements V_i = share of negatives below positive i, and V_j likewise for
    negative j, DeLong et al. (1988) have Var A = sum_i (V_i - A)^2 / m (m-1) + sum_j (V_j - A)^2 / n (n-1).
    The terms are each picture's influence: they are added over classes, and over the pictures of a patient
    (Obuchowski 1997), before they are squared. The interval is made on the logit scale, so it stays in 0..1.
    There is none where all pairs are in the right order, or a class has a single picture.
    """
    s, y = _checked(scores, labels)
    present = np.unique(y)
    if len(present) < 2 or not np.isfinite(s).all():
        return Estimate(None)
    parts = [_influence(s[:, k], y == k) for k in present]
    area = float(np.mean([part for part, _ in parts]))
    influence = np.mean([values for _, values in parts], axis=0)
    if groups is not None:
        influence = _by_group(influence, groups)
    variance = float((influence**2).sum())
    if not (np.isfinite(variance) and variance > 0 and 0 < area < 1):
        return Estimate(area)
    middle, half = np.log(area / (1 - area)), float(scipy.special.ndtri((1 + confidence) / 2)) * variance**0.5
    half /= area * (1 - area)
    low, high = (float(1 / (1 + np.exp(-np.clip(middle + sign * half, -700, 700)))) for sign in (-1, 1))
    return Estimate(area, low, high)


def _influence(scores: Floats, positive: Bools) -> tuple[float, Floats]:
    """Compute a class's AUROC against the rest, and each picture's influence; nan with only one picture."""
    below, above = np.sort(scores[~positive]), np.sort(scores[positive])
    m, n = len(above), len(below)
    placed = np.empty(len(scores))
    placed[positive] = _share_below(scores[positive], below)
    placed[~positive] = 1 - _share_below(scores[~positive], above)
    area = float(placed[positive].mean())
    scale = np.where(positive, m * (m - 1), n * (n - 1)).astype(np.float64)
    return area, (placed - area) / np.sqrt(np.where(scale > 0, scale, np.nan))


def _share_below(values: Floats, others: Floats) -> Floats:
    """Share of sorted others below each value, ties counting half."""
    less, at_most = (np.searchsorted(others, values, side) for side in ("left", "right"))
    share: Floats = (less + at_most) / (2 * len(others))
    return share


def sensitivity_interval(
    scores: ArrayLike,
    positive: ArrayLike,
    specificity: float = 0.9,
    groups: Groups = None,
    confidence: float = 0.95,
    draws: int = DRAWS,
) -> Estimate:
    """Share of positives above the lowest threshold that keeps `specificity` of the negatives at or below it.

    The threshold comes from the same pictures, so it varies too: pictures (or patients) are drawn anew with
    replacement, threshold and share are found again each time, and the interval holds the middle of them. It
    also holds Wilson's for the threshold found: drawing anew from none or all gives none or all.
    """
    if not 0 < specificity <= 1:
        raise FedLDError(f"a specificity lies between 0 and 1, not {specificity:g}")
    s, sick = np.asarray(scores, np.float64), np.asarray(positive, bool)
    if not np.isfinite(s).all() or sick.all() or not sick.any():
        return Estimate(None)
    order = np.argsort(s, kind="stable")
    names = np.arange(len(s)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    s, sick, unit = s[order], sick[order], names[order]
    count, estimates = int(unit.max()) + 1, []
    rng = numpy_generator(0, "bootstrap", len(s))
    for start in range(0, draws, step := max(1, CHUNK // len(s))):
        times = rng.multinomial(count, np.full(count, 1 / count), min(step, draws - start))
        estimates.append(_sensitivity(s, sick, times[:, unit].astype(np.float64), specificity))
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(np.concatenate(estimates), [tail, 1 - tail])
    caught = s[sick] > _threshold(s, np.cumsum(~sick)[None], specificity)
    fixed = accuracy_interval(caught, None if groups is None else unit[sick], confidence)
    assert fixed.low is not None
    assert fixed.high is not None
    return Estimate(fixed.value, min(float(low), fixed.low), max(float(high), fixed.high))


def _sensitivity(scores: Floats, positive: Bools, times: Floats, specificity: float) -> Floats:
    """Compute the sensitivity for each row of `times`, how often a picture counts, in order of scores."""
    below = np.cumsum(times * ~positive, axis=1)
    threshold = _threshold(scores, below, specificity)
    caught = (times * (positive & (scores > threshold[:, None]))).sum(1)
    sick = (times * positive).sum(1)
    usable = (sick > 0) & (below[:, -1] > 0)
    shares: Floats = np.divide(caught, sick, out=np.full(len(times), np.nan), where=usable)
    return shares


def _threshold(scores: Floats, below: NDArray[Any], specificity: float) -> Floats:
    """Find the lowest score that enough negatives are at or below; `below` counts them in order of scores."""
    needed = specificity * below[:, -1] - 1e-9
    lowest: Floats = scores[np.argmax(below >= needed[:, None], axis=1)]
    return lowest


def _by_group(values: Floats, groups: Names) -> Floats:
    _, place = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(place, values).astype(np.float64)


def _checked(scores: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    s, y = np.asarray(scores, np.float64), np.asarray(labels).astype(np.int64)
    if s.ndim != 2 or y.shape != s.shape[:1]:
        raise FedLDError(f"scores must be (N, C) and labels (N,), got {s.shape} and {y.shape}")
    return s, y


def log_odds(probabilities: Floats) -> Floats:
    """log p_k - log of the others' sum, (N, C): orders pictures as p_k does, but never saturates."""
    p = np.maximum(np.asarray(probabilities, np.float64), 1e-300)
    others = np.stack([np.delete(p, k, axis=1).sum(1) for k in range(p.shape[1])], axis=1)
    odds: Floats = np.log(p) - np.log(others)
    return odds
