"""What goes into an aggregation: the caller's values, checked, and the clients that take part.

Every mistake is one sentence that names the thing. Clients that are left out and clients that stand out of
the others are both named.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedld.aggregation.rule import Array, Rule, make_rule
from fedld.aggregation.sketch import CountSketch
from fedld.aggregation.sources import Source, TensorSpec, file_source, matrix_source, state_source
from fedld.errors import FedLDError, nearest

EXACT_CLIENTS, EXACT_WORK = 100, 10**11  # beyond both, in clients m and in m^2 d, Gram matrices are sketched


WANTED = "updates must be a matrix, a list of state dicts, a list of files or a source"


def as_rule(rule: str | Rule, options: Mapping[str, Any]) -> Rule:
    """Give a rule by name with its options, or a rule as it is."""
    if isinstance(rule, str):
        return make_rule(rule, **options)
    if options:
        raise FedLDError(f"options {sorted(options)} belong to a rule given by name, not to a Rule value")
    return rule


def as_names(updates: Any, clients: Sequence[str] | None) -> list[str]:
    """Give the clients' names: numbers if none are given."""
    if not isinstance(updates, Source) and not hasattr(updates, "__len__"):
        raise FedLDError(f"{WANTED}, not {type(updates).__name__}")
    m = updates.clients if isinstance(updates, Source) else len(updates)
    if m == 0:
        raise FedLDError("there are no updates to aggregate")
    if clients is not None and not isinstance(clients, Iterable):
        raise FedLDError(f"clients are names, one for each update, not {clients!r:.80}")
    names = [str(i) for i in range(m)] if clients is None else [str(name) for name in clients]
    if len(names) != m:
        raise FedLDError(f"{len(names)} client names for {m} updates")
    if len(set(names)) < m:
        raise FedLDError(f"client name '{max(names, key=names.count)}' is given twice")
    return names


def as_source(updates: Any, tensors: Sequence[tuple[str, int]] | None, names: Sequence[str]) -> Source:
    """Give a source for any form of updates."""
    if isinstance(updates, torch.Tensor | np.ndarray):
        return matrix_source(updates, tensors)
    if tensors is not None:
        raise FedLDError("tensors are named for the columns of a matrix only")
    if isinstance(updates, Source):
        return updates
    if all(isinstance(state, Mapping) for state in updates):
        return state_source(updates, names)
    if all(isinstance(path, str | Path) for path in updates):
        return file_source(updates)
    raise FedLDError(WANTED)


def as_weights(sizes: Sequence[float], weights: str, names: Sequence[str]) -> Array:
    """Compute p: shares of the samples, or equal."""
    if weights not in ("size", "uniform"):
        raise FedLDError(f"weights = {weights!r} is not valid: {nearest(str(weights), ['size', 'uniform'])}")
    try:
        n = np.asarray(sizes, dtype=np.float64)
    except (TypeError, ValueError):
        raise FedLDError(f"sizes are numbers, one for each update, not {sizes!r:.80}") from None
    if n.shape != (len(names),):
        raise FedLDError(f"{n.size} sizes for {len(names)} updates")
    for name, size in zip(names, n, strict=True):
        if not (np.isfinite(size) and size > 0):
            raise FedLDError(f"client '{name}' has size {size:g}: sizes must be positive")
    with np.errstate(over="ignore"):
        total = n.sum()
    if not np.isfinite(total):
        raise FedLDError(f"the sizes add up to more than a number can hold (the largest is {n.max():g})")
    return np.full(len(n), 1 / len(n)) if weights == "uniform" else n / total


def check_bounds(max_weight: float | None, max_update_ratio: float | None) -> None:
    """Raise an error unless the largest weight is a share and the largest length at least the median's."""
    if max_weight is not None and not 0 < max_weight <= 1:
        raise FedLDError(f"max_weight = {max_weight!r} is not a share above 0 and at most 1")
    if max_update_ratio is not None and not max_update_ratio >= 1:
        raise FedLDError(f"max_update_ratio = {max_update_ratio!r} is not a number of at least 1")


@lru_cache(maxsize=16)
def as_groups(specs: tuple[TensorSpec, ...], granularity: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Group of each tensor, and the groups' names; the same in every round of a run."""
    titles = {
        "model": ["model"] * len(specs),
        "layer": [spec.layer for spec in specs],
        "tensor": [spec.name for spec in specs],
    }
    if granularity not in titles:
        raise FedLDError(f"granularity = {granularity!r} is not valid: {nearest(granularity, list(titles))}")
    order = {title: i for i, title in enumerate(sorted(set(titles[granularity])))}
    return tuple(order[title] for title in titles[granularity]), tuple(order)


def check_reference(source: Source, reference: torch.Tensor | None) -> None:
    """Raise an error unless the reference is a finite vector of the updates' length."""
    d = sum(spec.size for spec in source.specs)
    if reference is not None and reference.shape != (d,):
        raise FedLDError(f"the reference has {reference.numel()} parameters, but the updates have {d}")
    if reference is not None and not bool(reference.isfinite().all()):
        raise FedLDError("the reference holds numbers that are not finite")


def check_block(block: int) -> None:
    """Raise an error unless there is at least one column in a product."""
    if block < 1:
        raise FedLDError(f"block = {block} is not a number of columns")


def as_sketch(gram: str | CountSketch, clients: int, size: int, granularity: str) -> CountSketch | None:
    """Give the sketch that Gram matrices of such updates are computed from; None for exact ones."""
    if gram not in ("auto", "exact", "sketch") and not isinstance(gram, CountSketch):
        raise FedLDError(f"gram = {gram!r} is not valid: {nearest(str(gram), ['auto', 'exact', 'sketch'])}")
    large = clients > EXACT_CLIENTS and clients * clients * size > EXACT_WORK
    if gram == "exact" or (gram == "auto" and not (large and granularity == "model")):
        return None
    if granularity != "model":
        raise FedLDError(f"gram = 'sketch' is for granularity = 'model', not {granularity!r}")
    if isinstance(gram, CountSketch):
        return gram
    short = 1 << max(
        6, (size // 8).bit_length() - 1
    )  # its error is estimated from several numbers per bucket
    return CountSketch(min(16384 if clients <= 256 else 8192, short))


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
    """Give clients with an update longer than `max_ratio` times the median, and why they are refused.

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
    """Give places of the clients that take part, and why the others do not.

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
    """Give clients far longer than the median, or pointing against the others, among those that take part."""
    lengths = np.sqrt(np.diagonal(K))
    there = np.flatnonzero(lengths > 0)
    if len(there) < FEWEST:
        return []
    r = lengths[there]
    cosines = K[np.ix_(there, there)] / np.outer(r, r)
    np.fill_diagonal(cosines, np.nan)
    towards = np.nanmedian(cosines, axis=1)
    longer, along = robust_z(np.log(r), 0.25), robust_z(towards, 0.05)
    standing_out = []
    for k, name in enumerate(names[i] for i in there.tolist()):
        if longer[k] > OUTLYING:
            standing_out.append(Outlier(name, "length", float(r[k] / np.median(r)), float(longer[k])))
        if along[k] < -OUTLYING and towards[k] < 0:
            standing_out.append(Outlier(name, "direction", float(towards[k]), float(along[k])))
    return standing_out


def robust_z(values: Array, least: float) -> Array:
    """Divide deviations from the median by their scaled median absolute value, which is `least` at least."""
    away = values - np.median(values)
    return np.asarray(away / max(MAD_TO_SIGMA * float(np.median(np.abs(away))), least))


def statistic_problem(name: str, values: torch.Tensor) -> str | None:
    """Say why a client's statistic (a BatchNorm buffer) cannot be used; None if it can."""
    if values.is_floating_point() and not bool(values.isfinite().all()):
        return f"its statistic '{name}' is not finite"
    if name.endswith("running_var") and bool((values < 0).any()):
        return f"its variance '{name}' is negative"
    return None
