"""Records of format 1, as fedld wrote them before there were tasks, read as records of format 2.

Format 1 had every measure as a field of its own name, the user's metrics in tables of their own, and no
description of the measures.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fedld.tasks.measure import Measure, Scores, finite_values
from fedld.tasks.scores import MEASURES

TEST = ("accuracy", "balanced_accuracy", "auroc", "loss", "ece")
Line = dict[str, Any]


def upgrade(file: str, line: Line) -> Line:
    """Upgrade a line of a record file; one of format 2 stays as it is."""
    match file:
        case "rounds.jsonl":
            return upgrade_round(line)
        case "clients.jsonl":
            return upgrade_client(line)
    return line


def upgrade_round(line: Line) -> Line:
    """Upgrade a line of rounds.jsonl; one of format 2 stays as it is.

    >>> upgrade_round({"round": 1, "accuracy": 0.5, "client_accuracy": {"a": 0.25, "b": 0.75}})["test"]
    {'accuracy': 0.5, 'worst_client': 0.25}
    """
    if "test" in line:
        return line
    new = {key: value for key, value in line.items() if key not in _OLD}
    test: Scores = {name: line[name] for name in TEST if name in line}
    test |= _table(line.get("metrics"))
    clients = {name: {"accuracy": value} for name, value in _table(line.get("client_accuracy")).items()}
    for metric, values in _table(line.get("client_metrics")).items():
        for name, value in _table(values).items():
            clients.setdefault(name, {})[metric] = value
    if clients:
        values = [_number(scores.get("accuracy")) for scores in clients.values()]
        test["worst_client"] = None if None in values else min(finite_values(values))
        new["client_tests"] = clients
    if test:
        new["test"] = test
    if isinstance(line.get("personal_worst"), int | float):
        new["personal_worst"] = {"accuracy": line["personal_worst"]}
    for old, where, name in _SINGLE:
        if old in line:
            new.setdefault(where, {})[name] = line[old]
    return new


def upgrade_client(line: Line) -> Line:
    """Upgrade a line of clients.jsonl."""
    new = {key: value for key, value in line.items() if key not in _TRAINING}
    for when in ("before", "after"):
        scores = {name: line[f"{name}_{when}"] for name in ("accuracy", "loss") if f"{name}_{when}" in line}
        if scores:
            new[when] = scores
    return new


def upgrade_summary(summary: Line) -> Line:
    """Upgrade summary.json; one of format 2 stays as it is."""
    if "format" in summary:
        return summary
    new = {key: value for key, value in summary.items() if not key.startswith(_SUMMARY)}
    final: Scores = {name: summary[f"final_{name}"] for name in TEST if f"final_{name}" in summary}
    test: dict[str, Scores] = {"final": final | _table(summary.get("final_metrics"))}
    personal: dict[str, Scores] = {}
    for which in ("final", "last5", "best"):
        for where, prefix in ((test, ""), (personal, "personal_")):
            if f"{prefix}{which}_accuracy" in summary:
                value = summary[f"{prefix}{which}_accuracy"]
                where[which] = {"accuracy": value} | where.get(which, {})
    new |= {"test": test} | ({"personal": personal} if personal else {})
    if "validated_round" in summary:
        scores: Scores = {"accuracy": summary.get("validated_accuracy")}
        new["validated"] = {"round": summary["validated_round"], "test": scores}
    return new | {"format": 1}


def measures(summary: Mapping[str, Any] | None, lines: Iterable[Mapping[str, Any]]) -> tuple[Measure, ...]:
    """Name the measures of a run in upgraded lines: those of classification, and the user's."""
    less = (summary or {}).get("less_is_better")
    built_in = {measure.name for measure in MEASURES}
    names = dict.fromkeys(name for line in lines for name in _table(line.get("test")))
    further = [
        Measure(name=name, title=name, better="less" if isinstance(less, list) and name in less else "more")
        for name in names
        if name not in built_in and name != "count"
    ]
    return (*MEASURES, *further)


_SINGLE = (
    ("validation_images", "validation", "count"),
    ("validation_accuracy", "validation", "accuracy"),
    ("validation_loss", "validation", "loss"),
    ("personal_accuracy", "personal", "accuracy"),
    ("personal_own_accuracy", "personal_own", "accuracy"),
)
_OLD = {*TEST, "metrics", "client_accuracy", "client_metrics", *(old for old, _, _ in _SINGLE)}
_TRAINING = {f"{name}_{when}" for name in ("accuracy", "loss") for when in ("before", "after")}
_SUMMARY = (
    "final_",
    "last5_accuracy",
    "best_accuracy",
    "personal_final",
    "personal_last5",
    "personal_best",
    "validated_",
)


def _table(value: object) -> dict[str, Any]:
    """Read a table of a record; a damaged one is empty."""
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
