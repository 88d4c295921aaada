"""What clients' targets are like, in a few numbers: how far clients differ before any training."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedld.data.client import Client
    from fedld.data.federation import Federation

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
    facts = _of_targets(federation, client)
    if federation.features and len(client.train):
        missing = np.isnan(federation.images[client.train])
        numbers = ~np.array([" = " in name or name.endswith(" missing") for name in federation.features])
        if numbers.any():
            facts["missing cells"] = float(missing[:, numbers].mean())
    return facts


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
    facts = {}
    for k, name in enumerate(names[:MOST_NAMED]):
        known = labels[:, k] >= 0
        if known.any():
            facts[name] = float((labels[known, k] == 1).mean())
    return facts | {"unknown": float((labels < 0).mean())}


def _of_masks(labels: NDArray[Any], rows: NDArray[np.int64], names: tuple[str, ...]) -> TargetFacts:
    chosen = rows[np.linspace(0, len(rows) - 1, min(MOST_MASKS, len(rows))).astype(int)]
    masks = np.asarray(labels[chosen])
    facts = {"marked pixels": float((masks > 0).mean())}
    return facts | {
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
