"""`npz:PATH`: people's own images as arrays.

Keys: images and labels; optional split ('train' or 'test'), site, classes (names), and any further text
column that can name clients. Labels are class numbers, or with another task numbers, (N, 2) times and events
or (N, K) labels of 1, 0 and -1 (unknown); segmentation has masks (N, H, W) instead. Nothing is unpickled.

A file of three megabytes can unfold to gigabytes. So every array is checked by its header before a byte of
it is read: what the header declares must fit the member's length in the archive, and the whole must not be
hundreds of times the file.
"""

import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedld.data.masks import mask_targets, resize_masks, to_masks
from fedld.data.pixels import Progress, resize, to_uint8, with_channels
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, file_sha256, fingerprint, write_table
from fedld.data.targets import Targets, make_targets
from fedld.errors import FedLDError
from fedld.paths import user_path

Arrays = dict[str, NDArray[Any]]
Header = tuple[tuple[int, ...], np.dtype[Any]]
UNREADABLE = (
    *(OSError, ValueError, KeyError, EOFError, SyntaxError, RecursionError, OverflowError, TypeError),
    *(NotImplementedError, RuntimeError, MemoryError, struct.error, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, LZMAError),
)
EXPANSION = 200  # times the file's length that its arrays may be: pictures of tissue come to ten
SMALL = 64 << 20  # bytes that any file may unfold to
HEADER = 1 << 16


def read_arrays(file: Path, wanted: Callable[[str, Header], bool]) -> Arrays:
    """Read the arrays of an npz file that are wanted by name and header; pickled ones are refused."""
    try:
        with file.open("rb") as stream:
            if stream.read(6) == np.lib.format.MAGIC_PREFIX:
                raise FedLDError(f"{file} is a single array, not an npz archive")
        with zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if _is_array(m)}
            headers = {name: _header(archive, member) for name, member in members.items()}
            chosen = [name for name, header in headers.items() if header and wanted(name, header)]
            _check_size(file, {name: headers[name] for name in chosen})
            return {name: _read_array(archive, members[name]) for name in chosen}
    except UNREADABLE as error:
        raise FedLDError(
            f"{file} is not a readable npz file: {' '.join(str(error).split())[:200]}"
        ) from error


def _is_array(member: zipfile.ZipInfo) -> bool:
    return member.filename.endswith(".npy") and not member.is_dir()


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    """Read shape and type that a member declares; ValueError where it is shorter than that."""
    with archive.open(member) as stream:
        shape, dtype, start = parse_header(stream)
    if not dtype.hasobject and start + math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"'{member.filename}' declares {shape} numbers and is too short for them")
    return shape, dtype


def parse_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Parse shape, type and length of the header of an npy file."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"npy version {version}")
    shape, _, dtype = read[version](stream, max_header_size=HEADER)
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"an array cannot have shape {shape}")
    return shape, dtype, stream.tell()


def _check_size(file: Path, headers: dict[str, Header]) -> None:
    for name, (_, dtype) in headers.items():
        if dtype.hasobject:
            raise FedLDError(f"{file} holds pickled objects, which are never opened: '{name}'")
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values())
    if needed > max(SMALL, EXPANSION * file.stat().st_size):
        raise FedLDError(
            f"{file} would unfold to {needed / 2**20:.0f} MiB, over {EXPANSION} times its length: store it "
            "with less compression if that is right"
        )


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=HEADER)
        return array


TEXT = {"split": "US", "site": "USiu", "patient": "USiu"}  # dtype kinds that these columns may have
KNOWN = ("images", "labels", "split", "site", "patient", "classes")
MOST_CLASSES = 1000


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Check an npz file and copy it into the cache, keyed by the file's digest."""
    file = user_path(spec.dataset.removeprefix("npz:"))
    if not file.is_file():
        raise FedLDError(f"There is no file {file}")

    def build(folder: Path) -> None:
        masked = spec.task == "segmentation"
        arrays = read_columns(file, "masks" if masked else "labels")
        images = to_uint8(with_channels(arrays["images"], str(file)), str(file))
        columns = text_columns(arrays, len(images), str(file))
        labels, names, fields = _targets(arrays, images.shape[:3], spec, str(file))
        columns |= fields.pop("columns", {})
        if spec.image_size is not None:
            images = resize(images, spec.image_size)
            labels = resize_masks(labels, spec.image_size) if masked else labels
        split = columns.pop("split", np.full(len(images), "draw"))
        odd = set(split) - {"train", "test", "draw", ""}
        if odd:
            raise FedLDError(f"{file} has split '{min(odd)}'; rows are 'train', 'test', or '' to leave out")
        sites = set(columns.get("site", ())) - {""}
        write_table(
            folder,
            images,
            labels,
            names,
            split=split,
            columns=columns,
            partition="site" if len(sites) > 1 else "dirichlet",
            **fields,
        )

    task = () if spec.task == "classification" else (spec.task,)
    return cached(root, "npz", fingerprint("npz", file_sha256(file), spec.image_size, *task), build)


def _targets(
    arrays: Arrays, shape: tuple[int, ...], spec: DataSpec, what: str
) -> tuple[NDArray[Any], tuple[str, ...], dict[str, Any]]:
    """Make the targets of a task, with names of a model's outputs and fields of the table."""
    count = shape[0]
    names = [str(name) for name in arrays["classes"].ravel()] if "classes" in arrays else None
    if spec.task == "segmentation":
        return _described(spec.task, mask_targets(to_masks(arrays["masks"], shape, what), names, what))
    array = arrays["labels"]
    if spec.task == "classification":
        labels = to_labels(array, count, what)
        return labels, class_names(arrays, labels, what), {}
    if array.shape[:1] != (count,):
        raise FedLDError(f"{what} has labels of shape {array.shape} for {count} images")
    return _described(spec.task, make_targets(spec.task, array, what, labels=names))


def _described(task: str, made: Targets) -> tuple[NDArray[Any], tuple[str, ...], dict[str, Any]]:
    """Give targets, names of outputs, and fields of the table."""
    fields = {"task": task, "groups": made.names, "columns": {"group": made.groups.astype(np.str_)}}
    return made.values, made.outputs, fields


def read_columns(file: Path, targets: str = "labels") -> Arrays:
    """Read images, labels or masks, and every text column; other members are not read."""

    def wanted(name: str, header: Header) -> bool:
        shape, dtype = header
        return name in (*KNOWN, targets) or (len(shape) == 1 and dtype.kind in "US")

    arrays = read_arrays(file, wanted)
    missing = {"images", targets} - set(arrays)
    if missing:
        has = ", ".join(arrays) or "none"
        raise FedLDError(f"{file} has no array '{min(missing)}'; it has: {has}")
    return arrays


def to_labels(array: NDArray[Any], count: int, what: str) -> NDArray[np.int64]:
    """Check labels: one integer from 0 on for each image."""
    if array.shape != (count,) or not count:
        raise FedLDError(f"{what} has labels of shape {array.shape} for {count} images")
    if array.dtype.kind not in "fiub" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise FedLDError(f"{what} has labels that are not integers")
    if array.min() < 0 or array.max() >= 2**31:
        raise FedLDError(
            f"{what} has label {array.min() if array.min() < 0 else array.max():g}, out of range"
        )
    return array.astype(np.int64)


def class_names(arrays: Arrays, labels: NDArray[np.int64], what: str) -> tuple[str, ...]:
    """Read the archive's `classes`, else use the numbers 0 to C - 1, all of which must then occur."""
    if "classes" in arrays:
        if arrays["classes"].size > MOST_CLASSES:
            raise FedLDError(f"{what} names {arrays['classes'].size} classes; {MOST_CLASSES} are the most")
        names = tuple(str(name) for name in arrays["classes"].ravel())
        if len(set(names)) < len(names):
            raise FedLDError(f"{what} names class '{max(names, key=names.count)}' twice")
        if labels.max() >= len(names):
            raise FedLDError(f"{what} has label {labels.max()}, but names only {len(names)} classes")
        return names
    present = np.unique(labels)
    if len(present) > MOST_CLASSES:
        raise FedLDError(f"{what} has {len(present)} different labels; {MOST_CLASSES} are the most")
    if present[-1] != len(present) - 1:
        gap = next(i for i, label in enumerate(present) if i != label)
        raise FedLDError(
            f"{what} has label {present[-1]} but no label {gap}; count the labels from 0, or add 'classes'"
        )
    return tuple(map(str, present))


def text_columns(arrays: Arrays, count: int, what: str) -> dict[str, Text]:
    """Select the text arrays with one entry per image; sites may also be numbers."""
    columns = {}
    for name, array in arrays.items():
        if name in TEXT and (array.shape != (count,) or array.dtype.kind not in TEXT[name]):
            raise FedLDError(
                f"{what} has no usable '{name}': it needs one text entry for each of {count} images"
            )
        if name not in ("images", "labels", "masks", "classes") and array.shape == (count,):
            if array.dtype.kind == "S":
                columns[name] = np.char.decode(array, "utf-8", "replace")
            elif array.dtype.kind == "U" or name in TEXT:
                columns[name] = array.astype(np.str_)
    return columns
