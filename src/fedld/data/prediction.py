"""Input of a trained model: pictures (a file, a folder, an npz file), or rows of a table. Without targets."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedld.data.folder import is_image
from fedld.data.npz import read_arrays
from fedld.data.pixels import Listed, Pixels, describe_trouble, read_image, resize, to_uint8, with_channels
from fedld.data.sheet import LEVEL, MARK, MISSING, Columns, read_columns
from fedld.errors import FedLDError, printable


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
        raise FedLDError(f"There is no file {file}")
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
        raise FedLDError(
            f"{file}, line {row + 2}: '{name}' has '{printable(cell, 40)}', and a number is needed"
        )
    return value


def _check_levels(features: Sequence[str], columns: Columns, file: Path) -> None:
    """Refuse a category that the model has never seen: it has no feature for it."""
    levels: dict[str, set[str]] = {}
    for feature in features:
        name, mark, level = feature.partition(LEVEL)
        if mark and feature not in columns:
            levels.setdefault(name, set()).add(level)
    for name, expected in levels.items():
        for row, cell in enumerate(columns[name]):
            if cell not in expected and cell.lower() not in MISSING:
                raise FedLDError(
                    f"{file}, line {row + 2}: '{name}' has '{printable(cell, 40)}', which the model does "
                    "not know"
                )


BATCH = 256
Shape = tuple[int, int, int]
"""Channels, height, width."""


def read_pictures(path: Path, shape: Shape, bits: int | None = None) -> Iterator[tuple[list[str], Pixels]]:
    """Yield names and pixels (N, H, W, C) in the model's shape, prepared as training data are, in batches.

    Names are paths below the folder, or rows of an npz file. A picture that cannot be read is said by name.
    """
    if path.suffix == ".npz":
        images = _archive(path, shape)
        for start in range(0, len(images), BATCH):
            part = images[start : start + BATCH]
            yield [str(start + row) for row in range(len(part))], _channels(part, shape[0])
        return
    files, below = _files(path), path if path.is_dir() else path.parent
    if shape[1] != shape[2]:
        raise FedLDError(
            f"the model wants {shape[1]} x {shape[2]} pixels: files are cut to squares, use an npz"
        )
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        images = np.stack([_read(file, shape[1], bits) for file in some])
        yield [file.relative_to(below).as_posix() for file in some], _channels(images, shape[0])


def _read(file: Path, size: int, bits: int | None) -> Pixels:
    try:
        return read_image(file, size, bits)
    except Exception as error:  # decoders raise whatever they like on damaged bytes
        raise FedLDError(describe_trouble(Listed(file), error)) from None


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FedLDError(f"there are no pictures '{path}'")
    if not path.is_dir():
        return [path]
    files = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files = sorted(filter(is_image, files))
    if not files:
        raise FedLDError(f"the folder '{path}' holds no pictures")
    return files


def _archive(file: Path, shape: Shape) -> Pixels:
    if not file.is_file():
        raise FedLDError(f"there are no pictures '{file}'")
    arrays = read_arrays(file, lambda name, _: name == "images")
    if "images" not in arrays:
        raise FedLDError(f"{file} has no array 'images'")
    images = to_uint8(with_channels(arrays["images"], str(file)), str(file))
    if images.shape[1:3] != shape[1:]:
        if shape[1] != shape[2]:
            size = f"{images.shape[1]} x {images.shape[2]}"
            raise FedLDError(f"{file} has pictures of {size} pixels, the model wants {shape[1]} x {shape[2]}")
        images = resize(images, shape[1])
    return images


def _channels(images: Pixels, wanted: int) -> Pixels:
    """Convert grey pictures to coloured ones, or coloured ones to grey by Pillow's weights."""
    have = images.shape[-1]
    if have == wanted:
        return images
    if have == 1:
        return np.repeat(images, wanted, axis=-1)
    return np.stack([np.asarray(Image.fromarray(image).convert("L"))[..., None] for image in images])
