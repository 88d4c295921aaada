"""`csv:FILE`, CSV or parquet: a table of patients, one row each, with a target column.

Numbers are features as they are, texts become one column per category. A column with missing cells gets a
second one that says where they are; the cells themselves become the mean of all clients' training rows, which
also standardises the features. Nothing of a file is executed.

`images.csv` beside images: a row for every image with its path, label, site, patient and split.

Only `path` and `label` are needed. Every further column of text can name clients, as in an npz file. Paths
are below the folder of the file: a list reads no other files of the machine.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedld.data.npz import MOST_CLASSES
from fedld.data.pixels import Listed, Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, file_sha256, fingerprint, write_table
from fedld.data.targets import make_targets
from fedld.errors import FedLDError, nearest, printable
from fedld.paths import cache_root, user_path

CATEGORIES = 50
"""Most different texts of a column that is used as a category."""
LARGEST = 1 << 30  # bytes
MISSING = ("", "na", "nan", "null", "none", "?")
MARK = " missing"
"""End of the name of a feature that marks missing cells."""
LEVEL = " = "
"""Between column and category in the name of a feature."""
Columns = dict[str, list[str]]


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Read a CSV file into the cache, keyed by its content and by what its columns mean."""
    file = user_path(spec.dataset.removeprefix("csv:"))
    if not file.is_file():
        raise FedLDError(f"There is no file {file}")
    if file.stat().st_size > LARGEST:
        raise FedLDError(f"{file} has more than {LARGEST >> 20} MB")
    meaning = (spec.task, spec.target_column, spec.site_column, spec.split_column, spec.drop)
    key = fingerprint("csv", file_sha256(file), meaning)
    return cached(root, "csv", key, lambda folder: _build(folder, read_columns(file), file, spec))


def table_of_frame(frame: Any, spec: DataSpec) -> Table:
    """Write a pandas or polars frame to the cache as if it were a CSV file.

    Args:
        frame: has `columns`, and `frame[name]` is a column with a method `to_list`.
        spec: what its columns mean.

    Returns:
        The table, keyed by the frame's content.

    Raises:
        FedLDError: no frame, or one that cannot be used.
    """
    if not hasattr(frame, "columns") or not hasattr(frame, "__getitem__"):
        raise FedLDError(f"a frame has columns by name, which {type(frame).__name__} has not")
    names = list(frame.columns)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise FedLDError(f"the columns of a frame have different names, not {names!r:.80}")
    columns = {name: [_cell(value) for value in frame[name].to_list()] for name in names}
    if not columns or not len(next(iter(columns.values()))):
        raise FedLDError("the frame has no rows")
    meaning = (spec.task, spec.target_column, spec.site_column, spec.split_column, spec.drop)
    source = Path(spec.dataset)
    key = fingerprint("frame", columns, meaning)
    return cached(cache_root(), "frame", key, lambda folder: _build(folder, columns, source, spec))


def _cell(value: Any) -> str:
    """Format a cell as a CSV file would have it; missing values are empty, however they are written."""
    if value is None or value != value or str(value) in ("<NA>", "NaT"):
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).strip()


def _build(folder: Path, columns: Columns, file: Path, spec: DataSpec) -> None:
    if not spec.target_column:
        raise FedLDError(f"name the target column of {file}: --target-column NAME, of survival TIME,EVENT")
    targets = [name.strip() for name in spec.target_column.split(",")]
    dropped = [name.strip() for name in spec.drop.split(",") if name.strip()]
    roles = [*targets, *filter(None, (spec.site_column, spec.split_column)), *dropped]
    for name in roles:
        if name not in columns:
            raise FedLDError(f"{file} has no column '{name}': {nearest(name, list(columns))}")
    count = len(next(iter(columns.values())))
    texts: dict[str, NDArray[np.str_]] = {}
    if spec.site_column:
        texts["site"] = _sites(columns[spec.site_column], spec.site_column, file)
    if "patient" in columns and "patient" not in roles:
        texts["patient"] = np.array(columns["patient"])
        roles.append("patient")
    split = np.full(count, "draw")
    if spec.split_column:
        split = _split(columns[spec.split_column], spec.split_column, file)
    names, features = make_features(
        {name: cells for name, cells in columns.items() if name not in roles}, file
    )
    labels: NDArray[Any]
    fields: dict[str, Any] = {"partition": "site" if "site" in texts else "dirichlet", "features": names}
    if spec.task == "classification":
        labels, classes = _classes(columns[targets[0]], targets[0], file)
    else:
        values = _target_values({name: columns[name] for name in targets}, spec, file)
        made = make_targets(spec.task, values, str(file), targets[0], labels=targets)
        labels, classes = made.values, made.outputs
        texts["group"] = made.groups.astype(np.str_)
        fields |= {"task": spec.task, "groups": made.names}
    write_table(folder, features, labels, classes, split=split, columns=texts, **fields)


def _target_values(columns: Columns, spec: DataSpec, file: Path) -> NDArray[np.float64]:
    """Read the numbers of the target columns; an empty cell of a label is unknown (-1)."""
    wanted = {"survival": 2, "regression": 1}.get(spec.task, len(columns))
    if len(columns) != wanted:
        raise FedLDError(f"{spec.task} has {wanted} target column(s), not '{spec.target_column}'")
    if spec.task == "multilabel":
        columns = {
            name: ["-1" if cell.lower() in MISSING else cell for cell in cells]
            for name, cells in columns.items()
        }
    values = np.stack([_numbers(cells, name, file) for name, cells in columns.items()], 1)
    return values[:, 0] if spec.task == "regression" else values


def read_columns(file: Path) -> Columns:
    """Read a CSV file, or a parquet file by its ending, as columns of text.

    Raises:
        FedLDError: no table: no rows, a name twice, a row of another length.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file)
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            head, *rows = list(csv.reader(stream)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedLDError(f"{file} is no readable CSV file: {error}") from None
    if not head or not rows:
        raise FedLDError(f"{file} has no rows under a head")
    for name in head:
        if head.count(name) > 1:
            raise FedLDError(f"{file} has two columns '{printable(name, 40)}'")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(head):
            raise FedLDError(f"{file}, line {number}: {len(row)} cells under {len(head)} columns")
    return {name: [row[k].strip() for row in rows] for k, name in enumerate(head)}


def _read_parquet(file: Path) -> Columns:
    """Read columns of numbers, texts, dates and yes or no (1 or 0); null cells are empty."""
    try:
        import polars
    except ImportError:
        raise FedLDError("parquet files need polars: pip install 'fedld[analysis]'") from None
    try:
        frame = polars.read_parquet(file)
    except Exception as error:  # polars raises many kinds for damaged files
        raise FedLDError(
            f"{file} is no readable parquet file: {' '.join(str(error).split())[:200]}"
        ) from None
    if not frame.height or not frame.width:
        raise FedLDError(f"{file} has no rows under a head")
    for name, kind in frame.schema.items():
        if kind.is_nested() or kind in (polars.Object, polars.Binary):
            raise FedLDError(f"{file}: column '{name}' is of {kind}, and numbers or texts are needed")
    return {name: [_text(value) for value in frame[name].to_list()] for name in frame.columns}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


def make_features(columns: Columns, file: Path) -> tuple[tuple[str, ...], NDArray[np.float32]]:
    """Turn columns of text into features (N, F) and their names; missing numbers are nan.

    >>> make_features({"age": ["60", ""], "sex": ["m", "f"]}, Path("a.csv"))[0]
    ('age', 'age missing', 'sex = f', 'sex = m')
    """
    names: list[str] = []
    made: list[NDArray[np.float64]] = []
    for name, cells in columns.items():
        missing = np.array([cell.lower() in MISSING for cell in cells])
        numbers = [_number(cell) for cell in cells]
        if all(number is not None for number, gone in zip(numbers, missing, strict=True) if not gone):
            values = np.array([math.nan if number is None else number for number in numbers])
            names.append(name)
            made.append(values)
            if missing.any():
                names.append(f"{name} missing")
                made.append(missing.astype(np.float64))
            continue
        levels = sorted({cell for cell, gone in zip(cells, missing, strict=True) if not gone})
        if len(levels) > CATEGORIES:
            row = next(k for k, number in enumerate(numbers) if number is None and not missing[k])
            raise FedLDError(
                f"{file}, line {row + 2}, column '{name}': '{printable(cells[row], 40)}' is no number, and "
                f"{len(levels)} different texts are no category: leave it out (--set data.drop={name})"
            )
        for level in levels:
            names.append(f"{name} = {level}")
            made.append(np.array([float(cell == level) for cell in cells]))
    if not made:
        raise FedLDError(f"{file} has no column left to learn from")
    return tuple(names), np.stack(made, 1).astype(np.float32)


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(cells: list[str], name: str, file: Path) -> NDArray[np.float64]:
    for row, cell in enumerate(cells):
        if _number(cell) is None:
            problem = "is empty" if cell.lower() in MISSING else f"has '{printable(cell, 40)}'"
            raise FedLDError(f"{file}, line {row + 2}: the target '{name}' {problem}, and a number is needed")
    return np.array([float(cell) for cell in cells])


def _classes(cells: list[str], name: str, file: Path) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    for row, cell in enumerate(cells):
        if cell.lower() in MISSING:
            raise FedLDError(f"{file}, line {row + 2}: the target '{name}' is empty")
    levels = sort_levels(cells)
    if len(levels) > CATEGORIES:
        raise FedLDError(f"{file}: the target '{name}' has {len(levels)} classes; is it a --task regression?")
    return np.array([levels.index(cell) for cell in cells], np.int64), levels


def sort_levels(cells: Iterable[str]) -> tuple[str, ...]:
    """Sort the different values of a column: numbers by size, then words.

    >>> sort_levels(["10", "well", "9", "ill", "9"])
    ('9', '10', 'ill', 'well')
    """
    return tuple(sorted(set(cells), key=lambda cell: (_number(cell) is None, _number(cell) or 0.0, cell)))


def _sites(cells: list[str], name: str, file: Path) -> NDArray[np.str_]:
    for row, cell in enumerate(cells):
        if not cell:
            raise FedLDError(f"{file}, line {row + 2}: the site column '{name}' is empty")
    return np.array(cells)


def _split(cells: list[str], name: str, file: Path) -> NDArray[np.str_]:
    for row, cell in enumerate(cells):
        if cell not in ("train", "test", ""):
            raise FedLDError(
                f"{file}, line {row + 2}: '{name}' is 'train', 'test' or empty, not '{printable(cell, 40)}'"
            )
    return np.array(cells)


IMAGES_CSV = "images.csv"
SPLITS = ("train", "test", "")


class ImageList(NamedTuple):
    """Images in order, each with its class, its split and what further columns say of it."""

    items: list[Listed]
    files: Text
    labels: Text
    split: Text
    columns: dict[str, Text]
    classes: tuple[str, ...]


def read_list(folder: Path) -> ImageList:
    """Read the `images.csv` of a folder.

    Args:
        folder: holds images.csv and, below it, the images.

    Returns:
        The images in the order of the rows. Whether a file is there and can be read shows when it is decoded.

    Raises:
        FedLDError: no such table, or a row of it cannot be used; it is named by file and line.
    """
    file = folder / IMAGES_CSV
    if file.stat().st_size > LARGEST:
        raise FedLDError(f"{file} has more than {LARGEST >> 20} MB")
    columns = read_columns(file)
    for name in ("path", "label"):
        if name not in columns:
            raise FedLDError(f"{file} has no column '{name}': {nearest(name, list(columns))}")
    paths, labels = columns.pop("path"), columns.pop("label")
    split = columns.pop("split", ["draw"] * len(paths))
    for trouble in _troubles(paths, labels, split, columns):
        raise FedLDError(f"{file}, {trouble}")
    classes = sort_levels(labels)
    if len(classes) > MOST_CLASSES:
        raise FedLDError(f"{file} has {len(classes)} different labels; {MOST_CLASSES} are the most")
    columns.pop("file", None)  # the path is what a record calls the file
    return ImageList(
        [Listed(folder / path, f"{IMAGES_CSV} line {line}") for line, path in enumerate(paths, start=2)],
        np.array([PurePosixPath(path).as_posix() for path in paths]),
        np.array(labels),
        np.array(split),
        columns={name: np.array(cells) for name, cells in columns.items()},
        classes=classes,
    )


def _troubles(
    paths: Sequence[str], labels: Sequence[str], split: Sequence[str], columns: Columns
) -> Iterator[str]:
    """Yield what is wrong, row by row, and where."""
    sites = columns.get("site")
    drawn = set(split) == {"draw"}
    first: dict[str, int] = {}
    for row, path in enumerate(paths):
        line, plain = row + 2, PurePosixPath(path)
        if not path or "\0" in path:
            yield f"line {line}: the path is empty"
        if plain.is_absolute() or ".." in plain.parts or Path(path).is_absolute():
            yield (
                f"line {line}: '{printable(path, 80)}' is not below the folder of {IMAGES_CSV}: "
                "paths are relative"
            )
        if (before := first.setdefault(plain.as_posix(), line)) != line:
            yield f"line {line}: '{printable(path, 80)}' is listed before, in line {before}"
        if not labels[row]:
            yield f"line {line}: the label of '{printable(path, 80)}' is empty"
        if not drawn and split[row] not in SPLITS:
            shown = printable(split[row], 40)
            yield f"line {line}: the split is 'train', 'test' or empty (left out), not '{shown}'"
        if sites and not sites[row] and split[row] in ("train", "draw"):
            yield f"line {line}: the site of '{printable(path, 80)}' is empty"
