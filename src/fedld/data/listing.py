"""`images.csv` beside images: a row for every image with its path, label, site, patient and split.

Only `path` and `label` are needed. Every further column of text can name clients, as in an npz file. Paths
are below the folder of the file: a list reads no other files of the machine.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedld.data.decode import Listed
from fedld.data.npz import MOST_CLASSES
from fedld.data.sheet import LARGEST, Columns, read_columns, sort_levels
from fedld.data.table import Text
from fedld.errors import FedLDError, nearest

NAME = "images.csv"
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
    file = folder / NAME
    if file.stat().st_size > LARGEST:
        raise FedLDError(f"{file} has more than {LARGEST >> 20} MB.")
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
        raise FedLDError(f"{file} has {len(classes)} different labels; {MOST_CLASSES} are the most.")
    columns.pop("file", None)  # the path is what a record calls the file
    return ImageList(
        [Listed(folder / path, f"{NAME} line {line}") for line, path in enumerate(paths, start=2)],
        np.array([PurePosixPath(path).as_posix() for path in paths]),
        np.array(labels),
        np.array(split),
        {name: np.array(cells) for name, cells in columns.items()},
        classes,
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
            yield f"line {line}: '{path[:80]}' is not below the folder of {NAME}; paths are relative to it"
        if (before := first.setdefault(plain.as_posix(), line)) != line:
            yield f"line {line}: '{path[:80]}' is listed before, in line {before}"
        if not labels[row]:
            yield f"line {line}: the label of '{path[:80]}' is empty"
        if not drawn and split[row] not in SPLITS:
            yield f"line {line}: the split is 'train', 'test' or empty (left out), not '{split[row][:40]}'"
        if sites and not sites[row] and split[row] in ("train", "draw"):
            yield f"line {line}: the site of '{path[:80]}' is empty"
