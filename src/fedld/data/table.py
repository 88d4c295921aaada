"""The cache: a dataset decoded once into a folder of arrays that every process can map.

A folder holds images.npy (uint8, N H W C), labels.npy, split.npy ('train', 'test', 'draw': by the seed, '':
unused), one column_K.npy for each further text column, table.json, and, if mean and std are not given,
moments.npy (sum and sum of squares of every image and channel). It is built aside and renamed, so that it is
complete or absent.
"""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError

FORMAT = 3  # part of every fingerprint: raise it when the layout or the decoding changes
DAY = 86400.0
Text = NDArray[np.str_]
Build = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A decoded dataset before it is divided among clients."""

    folder: Path
    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    split: Text
    columns: Mapping[str, Text] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None  # None: from the training pixels
    std: tuple[float, ...] | None = None
    partition: str = "dirichlet"  # the dataset's own, where it names clients
    fixed: bool = False  # the partition is already in the pictures: every site is a client
    skipped: tuple[str, ...] = ()
    pixels: str = ""  # digest of all pixels
    notes: tuple[str, ...] = ()
    task: str = "classification"
    groups: tuple[str, ...] = ()  # names of the groups that draws keep in proportion; none: the classes
    features: tuple[str, ...] = ()  # names of the columns of a table of numbers

    @property
    def strata(self) -> NDArray[np.int64]:
        """The group of every row that draws keep in proportion: its class, where it has one."""
        return self.columns["group"].astype(np.int64) if self.groups else self.labels

    def hashes(self) -> NDArray[np.void]:
        """Read a digest of every image: equal images have equal ones."""
        array: NDArray[np.void] = np.load(self.folder / "hashes.npy", allow_pickle=False).view("V32")[:, 0]
        return array

    def statistics(self, clients: Sequence[NDArray[np.int64]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute mean and standard deviation over the rows of all clients, unless the dataset gives them.

        Of pictures they are per channel, of pixel / 255; of a table of numbers per column.
        """
        if self.mean is not None and self.std is not None:
            return self.mean, self.std
        if self.features:
            images = np.load(self.folder / "images.npy", mmap_mode="r", allow_pickle=False)
            return column_statistics([images[rows] for rows in clients], self.features)
        rows = np.concatenate(clients)
        moments = np.load(self.folder / "moments.npy", allow_pickle=False)
        height, width = np.load(self.folder / "images.npy", mmap_mode="r", allow_pickle=False).shape[1:3]
        return mean_and_std(moments[rows].sum(axis=0), len(rows) * height * width)


def column_statistics(
    clients: Sequence[NDArray[np.float32]], names: Sequence[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and deviation per column from sums over clients; missing values are in no sum.

    Columns of zeros and ones that say what is missing stay as they are.
    """
    return statistics_of_sums([column_sums(values) for values in clients], names)


def column_sums(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Count known values of every column, and sum them and their squares: (3, F).

    Rows are added one after the other, however many columns there are, so that a site's sums have the bits
    that they have on one machine.
    """
    present = np.isfinite(values)
    wide = np.where(present, values, 0.0).astype(np.float64)
    if wide.shape[1] == 1:  # NumPy adds a single column pairwise
        present, wide = (np.pad(part, ((0, 0), (0, 1))) for part in (present, wide))
    return np.stack([present.sum(0), wide.sum(0), np.square(wide).sum(0)])[:, : values.shape[1]]


def statistics_of_sums(
    sums: Sequence[NDArray[np.float64]], names: Sequence[str]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and deviation per column from `column_sums` of every client."""
    count, first, second = np.zeros((3, len(names))) + sum(sums)
    mean = first / np.maximum(count, 1)
    std = np.sqrt(np.maximum(second / np.maximum(count, 1) - mean**2, 0.0))
    std[std < 1e-6] = 1.0  # a constant column
    is_indicator = np.array([name.endswith(" missing") for name in names])
    mean[is_indicator], std[is_indicator] = 0.0, 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def mean_and_std(sums: NDArray[np.int64], pixels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute both per channel, of pixel / 255, from the sum and the sum of squares of so many pixels."""
    first, second = sums / pixels
    std = np.sqrt(np.maximum(second - first**2, 0)) / 255
    # A constant channel would divide by zero; one grey level is the smallest deviation a pixel can show.
    return tuple(map(float, first / 255)), tuple(map(float, np.maximum(std, 1 / 255)))


def fingerprint(*parts: object) -> str:
    """Compute the key of a cache entry from everything that decides its content."""
    return sha256(json.dumps([FORMAT, *parts], sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """Compute the digest of a file's bytes."""
    digest = sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise FedLDError(f"{file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def cached(root: Path, name: str, key: str, build: Build) -> Table:
    """Open entry `name`-`key`, building it first where it is absent; safe if two processes race."""
    folder = root / f"{name}-{key[:20]}"
    if not folder.exists():
        _sweep(root)
        aside = Path(tempfile.mkdtemp(prefix=".build-", dir=root))
        try:
            build(aside)
            aside.rename(folder)
        except OSError as error:
            if not folder.exists():  # else: the other process was faster
                raise FedLDError(f"The cache entry {folder} cannot be written: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return read_table(folder)


def _sweep(root: Path) -> None:
    """Remove what builds that were killed left behind: anything that is a day old."""
    for folder in root.glob(".build-*"):
        if time.time() - folder.stat().st_mtime > DAY:
            shutil.rmtree(folder, ignore_errors=True)


def write_table(
    folder: Path,
    images: NDArray[Any],
    labels: NDArray[Any],
    classes: tuple[str, ...],
    *,
    split: Text,
    columns: Mapping[str, Text] | None = None,
    **fields: Any,
) -> None:
    """Write one cache folder; `images` may already be the folder's memory map. `facts` go to table.json."""
    if isinstance(images, np.memmap):
        images.flush()
    else:
        np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    if "mean" not in fields and "features" not in fields:
        np.save(folder / "moments.npy", _moments(images))
    np.save(folder / "split.npy", split)
    names = sorted(columns or {})
    for position, name in enumerate(names):
        np.save(folder / f"column_{position}.npy", (columns or {})[name])
    hashes = _hashes(images)
    np.save(folder / "hashes.npy", hashes)
    fields |= {"classes": classes, "columns": names, "pixels": sha256(hashes.data).hexdigest()}
    (folder / "table.json").write_text(json.dumps(fields))


def read_table(folder: Path) -> Table:
    """Open one cache folder."""
    try:
        fields: dict[str, Any] = json.loads((folder / "table.json").read_text())
        columns = {
            name: np.load(folder / f"column_{position}.npy", allow_pickle=False)
            for position, name in enumerate(fields.pop("columns"))
        }
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        return Table(
            folder=folder,
            labels=np.load(folder / "labels.npy", allow_pickle=False),
            split=np.load(folder / "split.npy", allow_pickle=False),
            columns=columns,
            **fields,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedLDError(f"The cache entry {folder} is damaged; delete it and run again") from error


def read_features(folder: Path) -> tuple[str, ...]:
    """Read the names of the features of a table of numbers; empty for pictures."""
    try:
        return tuple(json.loads((folder / "table.json").read_text()).get("features", ()))
    except (OSError, ValueError):
        return ()


def read_column(folder: Path, name: str) -> Text | None:
    """Read a text column of a cache folder; None where there is none of that name."""
    try:
        names = json.loads((folder / "table.json").read_text())["columns"]
        column: Text = np.load(folder / f"column_{names.index(name)}.npy", allow_pickle=False)
    except (OSError, ValueError, KeyError):
        return None
    return column


def _hashes(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Compute the digest of every image, (N, 32)."""
    digests = [sha256(np.ascontiguousarray(image).data).digest() for image in images]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(images), 32)


def _moments(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    moments = np.empty((len(images), 2, images.shape[-1]), np.int64)
    for row, image in enumerate(images):
        wide = image.astype(np.int64)
        moments[row] = wide.sum(axis=(0, 1)), (wide * wide).sum(axis=(0, 1))
    return moments
