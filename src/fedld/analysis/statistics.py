"""Paired comparison of methods over seeds or folds: the same data and initial weights in each pair.

Values of folds are not independent: any two training sets of K folds share most of their images, so that the
usual t test finds differences where there are none. The corrected resampled t test (Nadeau and Bengio, 2003)
replaces the variance of the mean, s^2 / n, by s^2 (1 / n + n_test / n_train), with n_test / n_train =
1 / (K - 1). There is no unbiased estimate of that variance (Bengio and Grandvalet, 2004); this one keeps the
rate of false findings near its level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.special on first use: a third of a second
from numpy.typing import ArrayLike

from fedld.errors import FedLDError


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of a - b over n pairs with its spread, 95 % t interval and two-sided p value (None for n = 1)."""

    n: int
    mean: float
    sd: float | None
    interval: tuple[float, float] | None
    p_value: float | None

    @property
    def effect_size(self) -> float | None:
        """Hedges' g of paired differences: mean / sd, times 1 - 3 / (4 (n - 1) - 1) for small n.

        None for fewer than three pairs, and where there is no spread to measure it in.
        """
        if self.n < 3 or not self.sd:
            return None
        return self.mean / self.sd * (1 - 3 / (4 * (self.n - 1) - 1))


def paired_difference(
    values_a: ArrayLike, values_b: ArrayLike, confidence: float = 0.95, *, folds: int | None = None
) -> PairedDifference:
    """Test a - b by a paired t test, with `folds` by the corrected resampled one.

    Equal differences in all pairs leave no spread: the interval is then a point and p is 0 (or 1 at point 0).

    >>> d = paired_difference([0.81, 0.84, 0.83], [0.80, 0.82, 0.80])
    >>> round(d.mean, 3), round(d.sd, 3), [round(x, 3) for x in d.interval], round(d.p_value, 3)
    (0.02, 0.01, [-0.005, 0.045], 0.074)
    """
    a, b = np.asarray(values_a, dtype=np.float64), np.asarray(values_b, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise FedLDError(f"paired values must be two lists of the same length, got {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise FedLDError("paired values must be finite")
    difference, n = a - b, len(a)
    mean = float(difference.mean())
    if n == 1:
        return PairedDifference(n=1, mean=mean, sd=None, interval=None, p_value=None)
    sd = float(difference.std(ddof=1))
    error = sd * (1 / n + overlap(folds)) ** 0.5
    half = float(scipy.special.stdtrit(n - 1, (1 + confidence) / 2)) * error
    return PairedDifference(
        n=n, mean=mean, sd=sd, interval=(mean - half, mean + half), p_value=_p_value(mean, error, n - 1)
    )


def overlap(folds: int | None) -> float:
    """Give what Nadeau and Bengio add to 1 / n: test images per training image; 0 without folds.

    >>> overlap(5), overlap(None)
    (0.25, 0.0)
    """
    return 0.0 if folds is None else 1 / (folds - 1)


def mean_interval(
    values: ArrayLike, confidence: float = 0.95, *, folds: int | None = None
) -> tuple[float, float] | None:
    """Give the t interval of a mean over seeds or, with the same correction, over folds.

    >>> [round(x, 2) for x in mean_interval([80.0, 82.0, 84.0, 81.0, 83.0], folds=5)]
    [79.06, 84.94]
    """
    test = paired_difference(values, np.zeros(np.shape(values)), confidence, folds=folds)
    return test.interval


def _p_value(mean: float, error: float, freedom: int) -> float:
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * scipy.special.stdtr(freedom, -abs(mean) / error))


def holm(pvalues: Sequence[float | None]) -> list[float | None]:
    """Adjust p values by Holm's step-down method (1979), in the given order; None (not tested) stays None.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    tested = sorted((p, index) for index, p in enumerate(pvalues) if p is not None)
    adjusted: list[float | None] = [None] * len(pvalues)
    running = 0.0
    for rank, (p, index) in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - rank) * p))
        adjusted[index] = running
    return adjusted
