"""Which clients are left out of an aggregation, and which stand out of the others: both are named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedld.aggregation.rule import Array
from fedld.errors import FedLDError

MAD_TO_SIGMA = 1.4826  # the median absolute deviation of a normal distribution is sigma / 1.4826
OUTLYING = 4.0  # robust deviations from the median
FEWEST = 4  # with fewer clients a median says little of who stands out


@dataclass(frozen=True)
class Outlier:
    """A client that stands out; `z` counts robust deviations (scaled median absolute ones) from the median.

    length     `value` is |g_i| / median |g_j|; deviations are taken of the logarithm
    direction  `value` is the median over the others of cos(g_i, g_j)
    """

    client: str
    kind: str
    value: float
    z: float

    def __str__(self) -> str:
        if self.kind == "length":
            what = f"is {self.value:.3g} times as long as the median"
        else:
            what = f"opposes the others, median cosine {self.value:.2f}"
        return f"{self.client}: its update {what} (z {self.z:.1f})"


def too_long(
    lengths: Array, names: Sequence[str], max_ratio: float, *, what: str = "update"
) -> dict[str, str]:
    """Clients whose length is more than `max_ratio` times the median of all, and why they are refused.

    >>> too_long(np.array([1.0, 1.0, 30.0]), ["a", "b", "c"], 10)
    {'c': 'its update is 30 times as long as the median, more than 10 times is refused'}
    """
    median = float(np.median(lengths)) if len(lengths) else 0.0
    if not median > 0:
        return {}
    return {
        name: f"its {what} is {length / median:.3g} times as long as the median, "
        f"more than {max_ratio:g} times is refused"
        for name, length in zip(names, lengths.tolist(), strict=True)
        if length > max_ratio * median
    }


def screen(
    K: Array, names: Sequence[str], refused: Mapping[str, str], max_ratio: float | None, least: int
) -> tuple[list[int], dict[str, str]]:
    """Places of the clients that take part, and why the others do not.

    A non-finite update spoils only its own row and column of K.
    """
    with np.errstate(invalid="ignore"):
        lengths = np.sqrt(np.diagonal(K, axis1=1, axis2=2).sum(axis=0))
    rejected = {name: refused[name] for name in names if name in refused}
    for name, length in zip(names, lengths, strict=True):
        if name not in rejected and not np.isfinite(length):
            nan = np.isnan(length)
            rejected[name] = f"its update holds {'NaN' if nan else 'infinite or too large numbers'}"
    sound = [i for i, name in enumerate(names) if name not in rejected]
    if max_ratio is not None:
        rejected |= too_long(lengths[sound], [names[i] for i in sound], max_ratio)
    keep = [i for i, name in enumerate(names) if name not in rejected]
    if len(keep) < max(1, least):
        raise FedLDError(
            f"{max(1, least)} clients are needed, but only {len(keep)} have finite updates; "
            f"rejected: {', '.join(f'{name} ({reason})' for name, reason in rejected.items()) or 'none'}"
        )
    return keep, rejected


def outliers(K: Array, names: Sequence[str]) -> list[Outlier]:
    """Clients far longer than the median, or pointing against the others, among those that take part."""
    lengths = np.sqrt(np.diagonal(K))
    there = np.flatnonzero(lengths > 0)
    if len(there) < FEWEST:
        return []
    r = lengths[there]
    cosines = K[np.ix_(there, there)] / np.outer(r, r)
    np.fill_diagonal(cosines, np.nan)
    towards = np.nanmedian(cosines, axis=1)
    longer, along = robust_z(np.log(r), 0.25), robust_z(towards, 0.05)
    found = []
    for k, name in enumerate(names[i] for i in there.tolist()):
        if longer[k] > OUTLYING:
            found.append(Outlier(name, "length", float(r[k] / np.median(r)), float(longer[k])))
        if along[k] < -OUTLYING and towards[k] < 0:
            found.append(Outlier(name, "direction", float(towards[k]), float(along[k])))
    return found


def robust_z(values: Array, least: float) -> Array:
    """Deviations from the median over the scaled median absolute deviation, which is `least` at least."""
    away = values - np.median(values)
    return np.asarray(away / max(MAD_TO_SIGMA * float(np.median(np.abs(away))), least))


def statistic_problem(name: str, values: torch.Tensor) -> str | None:
    """Why a client's statistic (a BatchNorm buffer) cannot be used; None if it can."""
    if values.is_floating_point() and not bool(values.isfinite().all()):
        return f"its statistic '{name}' is not finite"
    if name.endswith("running_var") and bool((values < 0).any()):
        return f"its variance '{name}' is negative"
    return None
