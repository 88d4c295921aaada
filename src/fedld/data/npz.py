"""`npz:PATH`: people's own images as arrays.

Keys: images and labels; optional split ('train' or 'test'), site, classes (names), and any further text
column that can name clients. Nothing is ever unpickled.
"""

import zipfile
import zlib
from lzma import LZMAError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data.pixels import Progress, resize, to_uint8, with_channels
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, file_sha256, fingerprint, write_table
from fedld.errors import FedLDError

TEXT = {"split": "US", "site": "USiu"}  # dtype kinds that these columns may have
Arrays = dict[str, NDArray[Any]]
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, LZMAError)


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Check an npz file and copy it into the cache, keyed by the file's digest."""
    file = Path(spec.dataset.removeprefix("npz:")).expanduser()
    if not file.is_file():
        raise FedLDError(f"There is no file {file}.")

    def build(folder: Path) -> None:
        arrays = read_arrays(file)
        images = to_uint8(with_channels(arrays["images"], str(file)), str(file))
        labels = to_labels(arrays["labels"], len(images), str(file))
        if spec.image_size is not None:
            images = resize(images, spec.image_size)
        columns = text_columns(arrays, len(images), str(file))
        split = columns.pop("split", np.full(len(images), "draw"))
        odd = set(split) - {"train", "test", "draw", ""}
        if odd:
            raise FedLDError(f"{file} has split '{min(odd)}'; rows are 'train', 'test', or '' to leave out.")
        sites = set(columns.get("site", ())) - {""}
        write_table(
            folder,
            images,
            labels,
            class_names(arrays, labels, str(file)),
            split=split,
            columns=columns,
            partition="site" if len(sites) > 1 else "dirichlet",
        )

    return cached(root, "npz", fingerprint("npz", file_sha256(file), spec.image_size), build)


def read_arrays(file: Path) -> Arrays:
    """All arrays of an npz file; pickled ones are refused, not opened."""
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise FedLDError(f"{file} is a single array, not an npz archive.")
        with archive:
            missing = {"images", "labels"} - set(archive.files)
            if missing:
                raise FedLDError(f"{file} has no array '{min(missing)}'; it has: {', '.join(archive.files)}.")
            return {name: archive[name] for name in archive.files}
    except UNREADABLE as error:
        if "allow_pickle" in str(error):
            raise FedLDError(f"{file} holds pickled objects, which are never opened.") from error
        raise FedLDError(f"{file} is not a readable npz file: {error}.") from error


def to_labels(array: NDArray[Any], count: int, what: str) -> NDArray[np.int64]:
    """One integer from 0 on for each image."""
    if array.shape != (count,):
        raise FedLDError(f"{what} has labels of shape {array.shape} for {count} images.")
    if array.dtype.kind not in "fiub" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise FedLDError(f"{what} has labels that are not integers.")
    if array.min() < 0 or array.max() >= 2**31:
        raise FedLDError(
            f"{what} has label {array.min() if array.min() < 0 else array.max():g}, out of range."
        )
    return array.astype(np.int64)


def class_names(arrays: Arrays, labels: NDArray[np.int64], what: str) -> tuple[str, ...]:
    """The archive's `classes`, else the numbers 0 to C - 1, all of which must then occur."""
    if "classes" in arrays:
        names = tuple(str(name) for name in arrays["classes"].ravel())
        if labels.max() >= len(names):
            raise FedLDError(f"{what} has label {labels.max()}, but names only {len(names)} classes.")
        return names
    present = np.unique(labels)
    if present[-1] != len(present) - 1:
        gap = next(i for i, label in enumerate(present) if i != label)
        raise FedLDError(
            f"{what} has label {present[-1]} but no label {gap}; count the labels from 0, or add 'classes'."
        )
    return tuple(map(str, present))


def text_columns(arrays: Arrays, count: int, what: str) -> dict[str, Text]:
    """The text arrays with one entry an image; sites may also be numbers."""
    columns = {}
    for name, array in arrays.items():
        if name in TEXT and (array.shape != (count,) or array.dtype.kind not in TEXT[name]):
            raise FedLDError(
                f"{what} has no usable '{name}': it needs one text entry for each of {count} images."
            )
        if name not in ("images", "labels", "classes") and array.shape == (count,):
            if array.dtype.kind == "S":
                columns[name] = np.char.decode(array, "utf-8", "replace")
            elif array.dtype.kind == "U" or name == "site":
                columns[name] = array.astype(np.str_)
    return columns
