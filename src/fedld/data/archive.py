"""Arrays of an npz file, each judged by its header before a byte of it is read.

A file of three megabytes can unfold to gigabytes: what a header declares must fit the archive's own account
of the member's length, and the whole must not be hundreds of times the file.
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

from fedld.errors import FedLDError

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
    """The arrays of an npz file that are wanted by name and header; pickled ones are refused, not opened."""
    try:
        with file.open("rb") as stream:
            if stream.read(6) == np.lib.format.MAGIC_PREFIX:
                raise FedLDError(f"{file} is a single array, not an npz archive.")
        with zipfile.ZipFile(file) as archive:
            members = {m.filename.removesuffix(".npy"): m for m in archive.infolist() if _is_array(m)}
            headers = {name: _header(archive, member) for name, member in members.items()}
            chosen = [name for name, header in headers.items() if header and wanted(name, header)]
            _check(file, {name: headers[name] for name in chosen})
            return {name: _read(archive, members[name]) for name in chosen}
    except UNREADABLE as error:
        raise FedLDError(
            f"{file} is not a readable npz file: {' '.join(str(error).split())[:200]}."
        ) from error


def _is_array(member: zipfile.ZipInfo) -> bool:
    return member.filename.endswith(".npy") and not member.is_dir()


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Header:
    """Shape and type that a member declares; ValueError where it is shorter than that."""
    with archive.open(member) as stream:
        shape, dtype, start = parse_header(stream)
    if not dtype.hasobject and start + math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"'{member.filename}' declares {shape} numbers and is too short for them")
    return shape, dtype


def parse_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and length of the header of an npy file."""
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in read:
        raise ValueError(f"npy version {version}")
    shape, _, dtype = read[version](stream, max_header_size=HEADER)
    if any(type(side) is not int or side < 0 for side in shape):
        raise ValueError(f"an array cannot have shape {shape}")
    return shape, dtype, stream.tell()


def _check(file: Path, headers: dict[str, Header]) -> None:
    for name, (_, dtype) in headers.items():
        if dtype.hasobject:
            raise FedLDError(f"{file} holds pickled objects, which are never opened: '{name}'.")
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in headers.values())
    if needed > max(SMALL, EXPANSION * file.stat().st_size):
        raise FedLDError(
            f"{file} would unfold to {needed / 2**20:.0f} MiB, over {EXPANSION} times its length: store it "
            "with less compression if that is right."
        )


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=HEADER)
        return array
