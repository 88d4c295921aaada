"""Records as flat tables: names and numbers for data frames and trackers, and predictions as CSV.

predictions.csv, and what `fedld predict` prints: name,label,predicted,p_healthy,p_diseased"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.records.reader import clean
from fedld.records.schema import ConflictLine, Summary


def flat_round(line: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a round's numbers: measures of the test set by name, others with their source in front.

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
    """Flatten a client's numbers in a round: measures with the time of measuring behind.

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
    """Flatten a run's results: `final_accuracy`, `last5_accuracy`, `personal_best_accuracy`, ..."""
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
    """Describe the first measure of the final model, or of the clients' own without a global one.

    >>> headline({"test": {"final": {"count": 9, "accuracy": 0.5}}})
    'accuracy 0.5000'
    """
    scores = summary.get("test") or summary.get("personal") or {}
    for name, value in _measures(scores.get("final")).items():
        return f"{name} {value:.4f}" if isinstance(value, int | float) else f"no finite {name}"
    return "no evaluation"


def gram_clients(line: ConflictLine) -> tuple[list[str], list[float]]:
    """Name the clients in the Gram matrix of a line with their weights (all of them in older records)."""
    weights = dict(zip(line["clients"], line["weights"], strict=True))
    names = line.get("gram_clients", line["clients"])
    return names, [weights[name] for name in names]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested tables to dotted keys.

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
    """Read values of measures by name; a damaged table has none."""
    return {name: v for name, v in _table(value).items() if name != "count"}


PREFIX = "p_"
NONE = ""  # the predicted class where a probability is not finite
FORMULA = ("=", "+", "-", "@")


def guarded(cell: object) -> object:
    """Put an apostrophe before a name that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def no_html(text: str) -> str:
    """Escape HTML in Markdown, whatever the names in it are.

    >>> no_html("a <b> & c")
    'a &lt;b> &amp; c'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bare(cell: str) -> str:
    """Remove that apostrophe."""
    return cell[1:] if cell[:1] == "'" and cell[1:].startswith(FORMULA) else cell


def columns_table(columns: Mapping[str, Sequence[str]]) -> str:
    """Write one row per sample: columns of text by name; predictions may begin like a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(list(columns))
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_cell(cell) for cell in row])
    return text.getvalue()


def _cell(cell: str) -> object:
    """Leave numbers as they are, guard names."""
    try:
        float(cell)
    except ValueError:
        return guarded(cell)
    return cell


def predictions_table(
    classes: Sequence[str], probabilities: NDArray[np.float64], columns: Mapping[str, Sequence[str]]
) -> str:
    """Write one row per picture: its columns, the predicted class, the probability of every class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "predicted", *(PREFIX + name for name in classes)])
    for cells, row in zip(zip(*columns.values(), strict=True), probabilities, strict=True):
        best = classes[int(row.argmax())] if np.isfinite(row).all() else NONE
        writer.writerow([*map(guarded, [*cells, best]), *(f"{value:.9g}" for value in row)])
    return text.getvalue()


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """predictions.csv, read: probabilities (N, classes) and the other columns by name."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    columns: Mapping[str, list[str]]


def read_predictions(file: Path) -> PredictionTable | None:
    """Read the table of a run; None where there is none; a damaged one raises an error."""
    if not file.is_file():
        return None
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            head, *rows = list(csv.reader(stream))
        at = head.index("predicted") + 1
        columns = {name: [_bare(row[k]) for row in rows] for k, name in enumerate(head[:at])}
        numbers = np.array([[float(value) for value in row[at:]] for row in rows]).reshape(len(rows), -1)
        classes = tuple(name.removeprefix(PREFIX) for name in head[at:])
        if len(rows) and numbers.shape[1] != len(classes):
            raise ValueError
    except (OSError, ValueError, IndexError, csv.Error):
        raise FedLDError(f"'{file}' is damaged: it is no table of predictions") from None
    return PredictionTable(classes, numbers.reshape(len(rows), len(classes)), columns)
