"""Predictions of single pictures as CSV: predictions.csv of a run, and what `fedld predict` prints.

name,label,predicted,p_healthy,p_diseased
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError

PREFIX = "p_"
NONE = ""  # the predicted class where a probability is not finite
FORMULA = ("=", "+", "-", "@")


def guarded(cell: object) -> object:
    """A name that a spreadsheet would run as a formula is kept text by a leading apostrophe."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def no_html(text: str) -> str:
    """Markdown in which nothing is HTML, whatever the names in it are.

    >>> no_html("a <b> & c")
    'a &lt;b> &amp; c'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _bare(cell: str) -> str:
    """The name without that apostrophe."""
    return cell[1:] if cell[:1] == "'" and cell[1:].startswith(FORMULA) else cell


def columns_table(columns: Mapping[str, Sequence[str]]) -> str:
    """One row per sample: columns of text by name; the first of the predictions may be a formula as well."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(list(columns))
    for row in zip(*columns.values(), strict=True):
        writer.writerow([_cell(cell) for cell in row])
    return text.getvalue()


def _cell(cell: str) -> object:
    """Numbers as they are, names guarded."""
    try:
        float(cell)
    except ValueError:
        return guarded(cell)
    return cell


def predictions_table(
    classes: Sequence[str], probabilities: NDArray[np.float64], columns: Mapping[str, Sequence[str]]
) -> str:
    """One row per picture: what is known of it, the predicted class, the probability of every class."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "predicted", *(PREFIX + name for name in classes)])
    for known, row in zip(zip(*columns.values(), strict=True), probabilities, strict=True):
        best = classes[int(row.argmax())] if np.isfinite(row).all() else NONE
        writer.writerow([*map(guarded, [*known, best]), *(f"{value:.9g}" for value in row)])
    return text.getvalue()


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """predictions.csv, read: probabilities (N, classes) and the other columns by name."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float64]
    columns: Mapping[str, list[str]]


def read_predictions(file: Path) -> PredictionTable | None:
    """The table of a run; None where there is none. One that was damaged is said in a sentence."""
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
