"""What a user gave, checked before any work: every mistake is one sentence that names the thing."""

from collections.abc import Iterable, Mapping, Sequence
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
    """A rule by name with its options, or a rule as it is."""
    if isinstance(rule, str):
        return make_rule(rule, **options)
    if options:
        raise FedLDError(f"options {sorted(options)} belong to a rule given by name, not to a Rule value")
    return rule


def as_names(updates: Any, clients: Sequence[str] | None) -> list[str]:
    """The clients' names: numbers if none are given."""
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
    """A source for any form of updates."""
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
    """p: shares of the samples, or equal."""
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
    """Error unless the largest weight is a share and the largest length at least the median's."""
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
    """Error unless the reference is a finite vector of the updates' length."""
    d = sum(spec.size for spec in source.specs)
    if reference is not None and reference.shape != (d,):
        raise FedLDError(f"the reference has {reference.numel()} parameters, but the updates have {d}")
    if reference is not None and not bool(reference.isfinite().all()):
        raise FedLDError("the reference holds numbers that are not finite")


def check_block(block: int) -> None:
    """Error unless there is at least one column in a product."""
    if block < 1:
        raise FedLDError(f"block = {block} is not a number of columns")


def as_sketch(gram: str | CountSketch, clients: int, size: int, granularity: str) -> CountSketch | None:
    """The sketch that Gram matrices of such updates are computed from; None for exact ones."""
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
