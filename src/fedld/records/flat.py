"""Records as flat tables of names and numbers, for data frames, trackers and one-line texts."""

from collections.abc import Mapping
from typing import Any

from fedld.records.reader import clean
from fedld.records.schema import ConflictLine, Summary


def flat_round(line: Mapping[str, Any]) -> dict[str, Any]:
    """A round's numbers: measures of the test set by name, others with where they were measured in front.

    >>> flat_round({"round": 1, "test": {"count": 9, "accuracy": 0.5}, "personal": {"accuracy": 0.75}})
    {'round': 1, 'accuracy': 0.5, 'personal_accuracy': 0.75}
    """
    flat: dict[str, Any] = {}
    for key, value in line.items():
        if key in ("test", "validation", "personal", "personal_worst", "personal_own"):
            prefix = "" if key == "test" else f"{key}_"
            flat |= {f"{prefix}{name}": v for name, v in _measures(value).items()}
        elif not isinstance(value, dict | list):
            flat[key] = value
    return flat


def flat_client(line: Mapping[str, Any]) -> dict[str, Any]:
    """A client's numbers in a round: measures with when they were measured behind.

    >>> flat_client({"round": 1, "before": {"count": 9, "loss": 0.5}})
    {'round': 1, 'loss_before': 0.5}
    """
    flat: dict[str, Any] = {}
    for key, value in line.items():
        if key in ("before", "after"):
            flat |= {f"{name}_{key}": v for name, v in _measures(value).items()}
        elif not isinstance(value, dict | list):
            flat[key] = value
    return flat


def flat_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's results: `final_accuracy`, `last5_accuracy`, `personal_best_accuracy`, and all plain values."""
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        if key in ("test", "personal"):
            prefix = "" if key == "test" else f"{key}_"
            for which, scores in _table(value).items():
                flat |= {f"{prefix}{which}_{name}": v for name, v in _measures(scores).items()}
        elif key == "validated":
            table = _table(value)
            flat["validated_round"] = table.get("round")
            flat |= {f"validated_{name}": v for name, v in _measures(table.get("test")).items()}
        elif not isinstance(value, dict | list):
            flat[key] = value
    return flat


def headline(summary: Summary) -> str:
    """The first measure of the final model, or of the clients' own where there is no global one.

    >>> headline({"test": {"final": {"count": 9, "accuracy": 0.5}}})
    'accuracy 0.5000'
    """
    scores = summary.get("test") or summary.get("personal") or {}
    for name, value in _measures(scores.get("final")).items():
        return f"{name} {value:.4f}" if isinstance(value, int | float) else f"no finite {name}"
    return "no evaluation"


def gram_clients(line: ConflictLine) -> tuple[list[str], list[float]]:
    """Names and weights of the clients whose Gram matrix a line holds (all of them in older records)."""
    weights = dict(zip(line["clients"], line["weights"], strict=True))
    names = line.get("gram_clients", line["clients"])
    return names, [weights[name] for name in names]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted keys.

    >>> flatten({"method": {"name": "fedprox", "mu": 0.1}, "lr": 0.05})
    {'method.name': 'fedprox', 'method.mu': '0.1', 'lr': '0.05'}
    """
    columns: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            columns |= flatten(value, f"{prefix}{key}.")
        else:
            columns[clean(prefix + key)] = clean(value)
    return columns


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _measures(value: object) -> dict[str, Any]:
    """Values of measures by name; a damaged table has none."""
    return {name: v for name, v in _table(value).items() if name != "count"}
