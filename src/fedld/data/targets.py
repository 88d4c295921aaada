"""Targets of tasks other than classification: numbers, times with events; and groups to draw from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError, nearest

TASKS = ("classification", "regression", "survival")
QUARTERS = 4


@dataclass(frozen=True, eq=False)
class Targets:
    """What is to be learned of every sample.

    values   (N,) numbers, or (N, 2) times and events
    outputs  names of a model's outputs
    groups   number of every sample's group: draws take a share of each
    names    of the groups
    """

    values: NDArray[np.float32]
    outputs: tuple[str, ...]
    groups: NDArray[np.int64]
    names: tuple[str, ...]


def check_task(task: str) -> None:
    """Refuse a task that there is not.

    Raises:
        FedLDError: there is no task of this name.
    """
    if task not in TASKS:
        raise FedLDError(f"unknown task '{task}': {nearest(task, list(TASKS))}")


def make_targets(task: str, values: NDArray[Any], what: str, name: str = "value") -> Targets:
    """Check the targets of a regression or of survival.

    Args:
        task: "regression" or "survival".
        values: (N,) numbers for a regression, (N, 2) times and events for survival.
        what: the source, for sentences.
        name: of the target.

    Raises:
        FedLDError: the values do not fit the task.
    """
    if values.dtype.kind not in "fiub":
        raise FedLDError(f"{what} has targets of {values.dtype}: {task} needs numbers")
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
