"""Columns of tables at several places: what each place has, the features that all have together, their sums.

A feature is a number ("age"), the mark of its missing cells ("age missing") or a category ("sex = f"), as
`fedld.data.sheet` names them. Places have the same columns; categories and missing cells may differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedld.data.sheet import LEVEL, MARK
from fedld.data.table import column_sums, statistics_of_sums
from fedld.errors import FedLDError

Kind = Literal["number", "text", "empty"]
Sums = tuple[float, float, float]
"""Number of known values, their sum, and the sum of their squares."""


@dataclass(frozen=True, kw_only=True)
class SheetColumn:
    """A column of one place's table.

    name     in the head of the table
    kind     numbers, texts, or no cell at all
    missing  whether cells are missing; known of numbers only
    levels   different texts, each with its number of training rows; None where that stays at the place
    sums     of the known numbers of training rows; None where they stay at the place
    """

    name: str
    kind: Kind
    missing: bool = False
    levels: Mapping[str, int | None] = field(default_factory=dict)
    sums: Sums | None = None


def columns_of(
    features: Sequence[str], values: NDArray[np.float32], train: NDArray[np.int64]
) -> list[SheetColumn]:
    """Give the columns behind a table's features.

    Args:
        features: names, as `fedld.data.sheet.make_features` gives them.
        values: (N, F), nan where a number is missing.
        train: rows that sums are over.

    Returns:
        One column for each in the table, in order.

    >>> x = np.array([[60.0, 0.0, 1.0], [50.0, 1.0, 0.0]], np.float32)
    >>> columns_of(["age", "sex = f", "sex = m"], x, np.arange(2))
    [SheetColumn(name='age', kind='number', missing=False, levels={}, sums=(2.0, 110.0, 6100.0)), \
SheetColumn(name='sex', kind='text', missing=False, levels={'f': 1, 'm': 1}, sums=None)]
    """
    count, first, second = column_sums(np.asarray(values)[train])
    columns: dict[str, SheetColumn] = {}
    for k, feature in enumerate(features):
        name, mark, level = feature.partition(LEVEL)
        if mark:
            earlier_levels = columns[name].levels if name in columns else {}
            columns[name] = SheetColumn(
                name=name, kind="text", levels={**earlier_levels, level: int(first[k])}
            )
        elif not _is_mark(feature, features):
            gone = np.isnan(values[:, k])
            kind: Kind = "empty" if gone.all() else "number"
            sums = float(count[k]), float(first[k]), float(second[k])
            columns[name] = SheetColumn(name=name, kind=kind, missing=bool(gone.any()), sums=sums)
    return list(columns.values())


def difference(columns: Sequence[SheetColumn], server: Sequence[SheetColumn]) -> str | None:
    """Say in which column a site's table differs from the server's; None where columns and kinds agree.

    >>> difference([SheetColumn(name="age", kind="text")], [SheetColumn(name="age", kind="number")])
    "it has column 'age' as text, the server as number"
    """
    by_name = {column.name: column for column in server}
    names = {column.name for column in columns}
    for column in columns:
        if column.name not in by_name:
            return f"it has column '{column.name}', which the server's table lacks: --drop leaves it out"
    for column in server:
        if column.name not in names:
            return f"it lacks column '{column.name}' of the server's table"
    for column in columns:
        kinds = column.kind, by_name[column.name].kind
        if "empty" not in kinds and kinds[0] != kinds[1]:
            return f"it has column '{column.name}' as {kinds[0]}, the server as {kinds[1]}"
    return None


def united_features(places: Mapping[str, Sequence[SheetColumn]]) -> tuple[str, ...]:
    """Give the features of all places' tables together: those of one table with all their rows.

    Args:
        places: the columns of every place by name; the first one gives their order.

    Raises:
        FedLDError: two places have a column in different kinds.
    """
    first = next(iter(places.values()))
    features: list[str] = []
    for name in [column.name for column in first]:
        same = {
            place: column for place, columns in places.items() for column in columns if column.name == name
        }
        texts = [place for place, column in same.items() if column.kind == "text"]
        numbers = [place for place, column in same.items() if column.kind == "number"]
        if texts and numbers:
            raise FedLDError(f"{texts[0]} has column '{name}' as text, {numbers[0]} as number")
        if texts:
            levels = sorted({level for column in same.values() for level in column.levels})
            features += [f"{name}{LEVEL}{level}" for level in levels]
            continue
        features.append(name)
        if any(column.missing for column in same.values()):
            features.append(f"{name}{MARK}")
    return tuple(features)


def aligned_rows(
    features: Sequence[str], values: NDArray[np.float32], wanted: Sequence[str]
) -> NDArray[np.float32]:
    """Give a table's rows under the features of all places.

    A category that this table has not is nowhere; a number without missing cells is missing nowhere.

    >>> aligned_rows(["age"], np.array([[60.0]], np.float32), ["age", "age missing", "sex = f"]).tolist()
    [[60.0, 0.0, 0.0]]
    """
    place = {feature: k for k, feature in enumerate(features)}
    made = np.zeros((len(values), len(wanted)), np.float32)
    for k, feature in enumerate(wanted):
        base = feature.removesuffix(MARK)
        if feature in place:
            made[:, k] = values[:, place[feature]]
        elif _is_mark(feature, wanted) and base in place:
            made[:, k] = np.isnan(values[:, place[base]])
    return made


def united_statistics(
    features: Sequence[str], places: Sequence[Sequence[SheetColumn]], rows: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Give mean and deviation of every feature over all places' training rows, from their sums.

    Args:
        features: as `united_features` gives them.
        places: the columns of every place, with sums.
        rows: number of training rows of every place.
    """
    sums = [
        np.array(list(_sums(features, columns, count))).T for columns, count in zip(places, rows, strict=True)
    ]
    return statistics_of_sums(sums, features)


def lonely_levels(places: Mapping[str, Sequence[SheetColumn]]) -> Iterator[str]:
    """Name the categories that a single place has."""
    owners: dict[str, list[str]] = {}
    for place, columns in places.items():
        for column in columns:
            for level, count in column.levels.items():
                if count != 0:
                    owners.setdefault(f"{column.name}{LEVEL}{level}", []).append(place)
    if len(places) < 2:
        return
    for feature, clients in owners.items():
        if len(clients) == 1:
            yield f"only client '{clients[0]}' has '{feature}'"


def _sums(features: Sequence[str], columns: Sequence[SheetColumn], rows: int) -> Iterator[Sums]:
    by_name = {column.name: column for column in columns}
    for feature in features:
        name, mark, level = feature.partition(LEVEL)
        if mark:
            count = float(by_name[name].levels.get(level) or 0)
            yield float(rows), count, count
        elif _is_mark(feature, features):
            yield 0.0, 0.0, 0.0
        else:
            yield by_name[name].sums or (0.0, 0.0, 0.0)


def _is_mark(feature: str, features: Sequence[str]) -> bool:
    return feature.endswith(MARK) and feature.removesuffix(MARK) in features
