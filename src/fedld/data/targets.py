"""Targets of tasks other than classification, groups that draws keep in proportion, summaries by client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError, unknown_name

if TYPE_CHECKING:
    from fedld.data.client import Client
    from fedld.data.federation import Federation


TASKS = ("classification", "multilabel", "regression", "segmentation", "survival")
MOST_LABELS = 200
QUARTERS = 4


@dataclass(frozen=True, eq=False)
class Targets:
    """What is to be learned of every sample.

    values   (N,) numbers, (N, 2) times and events, (N, K) labels (1, 0, -1: unknown), or (N, H, W) masks
    outputs  names of a model's outputs
    groups   number of every sample's group: draws take a share of each
    names    of the groups
    """

    values: NDArray[Any]
    outputs: tuple[str, ...]
    groups: NDArray[np.int64]
    names: tuple[str, ...]


def check_task(task: str) -> None:
    """Refuse a task that there is not.

    Raises:
        FedLDError: there is no task of this name.
    """
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)


def target_columns(task: str) -> int:
    """Give the number of axes of the targets of a task: 2 where a sample has several numbers."""
    return 2 if task in ("survival", "multilabel") else 1


def make_targets(
    task: str, values: NDArray[Any], what: str, name: str = "value", labels: Sequence[str] | None = None
) -> Targets:
    """Check the targets of a task other than classification.

    Args:
        task: "multilabel", "regression" or "survival".
        values: (N,) numbers for a regression, (N, 2) times and events for survival, (N, K) labels.
        what: the source, for sentences.
        name: of the target of a regression.
        labels: names of the K labels; numbers from 1 by default.

    Returns:
        The targets with names of outputs, and the groups that draws keep in proportion.

    Raises:
        FedLDError: the values do not fit the task.
    """
    if values.dtype.kind not in "fiub":
        raise FedLDError(f"{what} has targets of {values.dtype}: {task} needs numbers")
    if task == "multilabel":
        return _labels(values, what, labels)
    if task == "regression":
        if values.ndim != 1:
            raise FedLDError(
                f"{what} has targets of shape {values.shape}: regression needs one number a sample"
            )
        _finite(values[:, None], what)
        return _numbers(values.astype(np.float64), name)
    if values.ndim != 2 or values.shape[1] != 2:
        raise FedLDError(f"{what} has targets of shape {values.shape}: survival needs (time, event) a sample")
    _finite(values, what)
    times, events = values.T
    if (times < 0).any():
        raise FedLDError(f"{what}, row {int(np.flatnonzero(times < 0)[0]) + 1}: a time is negative")
    if not np.isin(events, (0, 1)).all():
        row = int(np.flatnonzero(~np.isin(events, (0, 1)))[0])
        raise FedLDError(f"{what}, row {row + 1}: an event is 0 or 1, not {events[row]:g}")
    return Targets(values.astype(np.float32), ("risk",), events.astype(np.int64), ("censored", "event"))


def _labels(values: NDArray[Any], what: str, names: Sequence[str] | None) -> Targets:
    """Group every sample by the rarest of its labels, so that draws have some of every label."""
    if values.ndim != 2 or not 1 <= values.shape[1] <= MOST_LABELS:
        raise FedLDError(
            f"{what} has labels of shape {values.shape}: multilabel needs (N, K), K up to {MOST_LABELS}"
        )
    bad = np.argwhere(~np.isin(values, (-1, 0, 1)))
    if len(bad):
        row, column = bad[0]
        raise FedLDError(
            f"{what}, row {row + 1}, label {column + 1}: a label is 1, 0 or -1 (unknown), "
            f"not {values[row, column]:g}"
        )
    names = tuple(names) if names is not None else tuple(str(k + 1) for k in range(values.shape[1]))
    if len(names) != values.shape[1] or len(set(names)) < len(names):
        raise FedLDError(
            f"{what} has {values.shape[1]} labels and {len(set(names))} different names for them"
        )
    present = (values == 1).sum(0)
    rarity = np.where(values == 1, present, len(values) + 1)
    groups = np.where((values == 1).any(1), rarity.argmin(1), len(names))
    return Targets(values.astype(np.float32), names, groups.astype(np.int64), (*names, "no label"))


def _finite(values: NDArray[Any], what: str) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(1))
    if len(bad):
        raise FedLDError(f"{what}, row {int(bad[0]) + 1}: the target is missing or not finite")


def _numbers(values: NDArray[np.float64], name: str) -> Targets:
    """Group values by quarters; equal quarters are one."""
    cuts = np.unique(np.quantile(values, np.arange(1, QUARTERS) / QUARTERS)) if len(values) else values
    groups = np.searchsorted(cuts, values, side="right")
    names = [f"below {cuts[0]:.4g}"] if len(cuts) else ["all"]
    names += [f"from {cut:.4g}" for cut in cuts]
    return Targets(values.astype(np.float32), (name,), groups.astype(np.int64), tuple(names))


MOST_MASKS = 500
"""Masks of a client that are looked at."""
MOST_NAMED = 20
TargetFacts = dict[str, float]


def target_facts(federation: "Federation", client: "Client") -> TargetFacts:
    """Describe a client's training targets, and the missing cells of its table.

    Args:
        federation: of any task.
        client: one of its clients.

    Returns:
        Numbers by name: of a regression mean, deviation, quartiles; of survival the share of events, the
        median time and events per unit of time; of several labels the prevalence of each among samples that
        know it and the share of unknown ones; of masks the share of marked pixels and of pictures with each
        class; of a table the share of missing numbers. Of data elsewhere, what its sums tell.
    """
    if client.elsewhere:
        return _of_sums(client.target_sums)
    summary = _of_targets(federation, client)
    if federation.features and len(client.train):
        missing = np.isnan(federation.images[client.train])
        numbers = ~np.array([" = " in name or name.endswith(" missing") for name in federation.features])
        if numbers.any():
            summary["missing cells"] = float(missing[:, numbers].mean())
    return summary


def _of_targets(federation: "Federation", client: "Client") -> TargetFacts:
    rows = client.train
    if not len(rows):
        return {}
    match federation.task:
        case "regression":
            return _of_numbers(np.asarray(federation.labels[rows], np.float64))
        case "survival":
            times, events = np.asarray(federation.labels[rows], np.float64).T
            rate = float(events.sum() / times.sum()) if times.sum() > 0 else 0.0
            return {
                "events": float(events.mean()),
                "median time": float(np.median(times)),
                "event rate": rate,
            }
        case "multilabel":
            return _of_labels(np.asarray(federation.labels[rows]), federation.classes)
        case "segmentation":
            return _of_masks(federation.labels, rows, federation.classes)
    return {}


def _of_numbers(values: NDArray[np.float64]) -> TargetFacts:
    lower, median, upper = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {
        "mean": float(values.mean()),
        "deviation": float(values.std()),
        "lower quartile": lower,
        "median": median,
        "upper quartile": upper,
    }


def _of_labels(labels: NDArray[Any], names: tuple[str, ...]) -> TargetFacts:
    prevalence = {}
    for k, name in enumerate(names[:MOST_NAMED]):
        is_known = labels[:, k] >= 0
        if is_known.any():
            prevalence[name] = float((labels[is_known, k] == 1).mean())
    return prevalence | {"unknown": float((labels < 0).mean())}


def _of_masks(labels: NDArray[Any], rows: NDArray[np.int64], names: tuple[str, ...]) -> TargetFacts:
    chosen = rows[np.linspace(0, len(rows) - 1, min(MOST_MASKS, len(rows))).astype(int)]
    masks = np.asarray(labels[chosen])
    shares = {"marked pixels": float((masks > 0).mean())}
    return shares | {
        name: float((masks == k).any(axis=(1, 2)).mean())
        for k, name in enumerate(names)
        if 0 < k <= MOST_NAMED
    }


def _of_sums(sums: Any) -> TargetFacts:
    if {"count", "target", "target_squared"} <= sums.keys() and sums["count"]:
        mean = sums["target"] / sums["count"]
        return {"mean": mean, "deviation": max(sums["target_squared"] / sums["count"] - mean**2, 0.0) ** 0.5}
    if {"events", "time"} <= sums.keys() and sums["time"] > 0:
        return {"event rate": sums["events"] / sums["time"]}
    return {}
