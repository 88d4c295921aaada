"""Decode many files once, with all cores, into the cache's memory map."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data.pixels import Pixels, Progress, read_image
from fedld.errors import FedLDError


@dataclass(frozen=True)
class Listed:
    """An image file and where it is listed ('train.csv line 7'), for a message that finds it."""

    file: Path
    where: str = ""

    def __str__(self) -> str:
        return f"{self.file} ({self.where})" if self.where else str(self.file)


@dataclass(frozen=True, eq=False)
class Decoded:
    """The pixels, which rows are good, and what was wrong with the others."""

    images: Pixels
    good: NDArray[np.bool_]
    skipped: tuple[str, ...]


def stamps(items: Iterable[Listed]) -> list[tuple[str, int, int]]:
    """What the cache's fingerprint needs of every file: path, size and time of change (-1: missing)."""
    return [(str(item.file), *_stamp(item.file)) for item in items]


def decode(
    folder: Path,
    items: Sequence[Listed],
    size: int,
    *,
    skip_bad: bool = False,
    bits: int | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """Read every file into `folder`/images.npy at `size` x `size` x 3.

    Threads are enough: Pillow and NumPy release the interpreter lock while they decode and resize. A damaged
    or missing file ends it with its name, or with `skip_bad` leaves a black row that nobody uses.
    """
    images = np.lib.format.open_memmap(
        folder / "images.npy", mode="w+", dtype=np.uint8, shape=(len(items), size, size, 3)
    )

    def read(row: int) -> str:
        try:
            images[row] = read_image(items[row].file, size, bits)
        except Exception as error:  # decoders raise whatever they like on damaged bytes
            return describe_trouble(items[row], error)
        return ""

    wrong: list[str] = []
    executor = ThreadPoolExecutor(os.cpu_count())
    try:
        for done, trouble in enumerate(executor.map(read, range(len(items))), start=1):
            wrong.append(trouble)
            if trouble and not skip_bad:
                raise FedLDError(trouble)
            if progress is not None:
                progress(done, len(items))
    finally:
        executor.shutdown(cancel_futures=True)
    return Decoded(images, np.array([not text for text in wrong]), tuple(filter(None, wrong)))


def describe_trouble(item: Listed, error: Exception) -> str:
    """Why a file cannot be used, in one sentence."""
    if isinstance(error, FileNotFoundError):
        return f"{item} is missing."
    if isinstance(error, FedLDError):
        return f"{item} is not usable: {str(error).rstrip('.')}."
    return f"{item} is damaged: {' '.join(str(error).split()).rstrip('.')}."


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
