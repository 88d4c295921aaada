"""Rows of a table for a model that was trained on one: the same columns, by name, under the same features."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data.sheet import MISSING, Columns, read_columns
from fedld.errors import FedLDError

MARK = " missing"
LEVEL = " = "


def read_rows(file: Path, features: Sequence[str]) -> tuple[list[str], NDArray[np.float32]]:
    """Read a table's rows as features of a trained model.

    Args:
        file: CSV or parquet file; other columns than the model's are ignored.
        features: names of the model's features, as `fedld.data.sheet.make_features` gives them.

    Returns:
        Names of the rows (column `patient`, else numbers from 1), and features (N, F), nan where missing.

    Raises:
        FedLDError: a column is missing, or a cell has a text or category that the model does not know.
    """
    if not file.is_file():
        raise FedLDError(f"There is no file {file}.")
    columns = read_columns(file)
    made = [_feature(feature, features, columns, file) for feature in features]
    _check_levels(features, columns, file)
    count = len(made[0])
    names = columns.get("patient") or [str(k) for k in range(1, count + 1)]
    return names, np.stack(made, 1).astype(np.float32)


def _feature(feature: str, features: Sequence[str], columns: Columns, file: Path) -> NDArray[np.float64]:
    name, mark, level = feature.partition(LEVEL)
    if mark and feature not in columns:
        return np.array([float(cell == level) for cell in _column(name, columns, file)])
    base = feature.removesuffix(MARK)
    if feature.endswith(MARK) and base in features:
        return np.array([float(cell.lower() in MISSING) for cell in _column(base, columns, file)])
    return np.array(
        [_number(cell, feature, k, file) for k, cell in enumerate(_column(feature, columns, file))]
    )


def _column(name: str, columns: Columns, file: Path) -> list[str]:
    if name not in columns:
        raise FedLDError(f"{file} has no column '{name}', which the model was trained on")
    return columns[name]


def _number(cell: str, name: str, row: int, file: Path) -> float:
    if cell.lower() in MISSING:
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise FedLDError(f"{file}, line {row + 2}: '{name}' has '{cell[:40]}', and a number is needed")
    return value


def _check_levels(features: Sequence[str], columns: Columns, file: Path) -> None:
    """Refuse a category that the model has never seen: it has no feature for it."""
    levels: dict[str, set[str]] = {}
    for feature in features:
        name, mark, level = feature.partition(LEVEL)
        if mark and feature not in columns:
            levels.setdefault(name, set()).add(level)
    for name, known in levels.items():
        for row, cell in enumerate(columns[name]):
            if cell not in known and cell.lower() not in MISSING:
                raise FedLDError(
                    f"{file}, line {row + 2}: '{name}' has '{cell[:40]}', which the model does not know"
                )
