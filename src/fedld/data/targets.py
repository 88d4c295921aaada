"""Targets of tasks other than classification: labels, numbers, times with events; and groups to draw from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError, unknown_name

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
    """A sample's group is the rarest of its labels, so that draws have some of every label."""
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
    """Groups are quarters of the values; equal quarters are one."""
    cuts = np.unique(np.quantile(values, np.arange(1, QUARTERS) / QUARTERS)) if len(values) else values
    groups = np.searchsorted(cuts, values, side="right")
    names = [f"below {cuts[0]:.4g}"] if len(cuts) else ["all"]
    names += [f"from {cut:.4g}" for cut in cuts]
    return Targets(values.astype(np.float32), (name,), groups.astype(np.int64), tuple(names))
