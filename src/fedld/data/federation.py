"""The Federation: every client's images as positions in one memory-mapped array, and one global test set."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedld.data.client import Client, Positions, pack, unpack
from fedld.data.spec import DataSpec
from fedld.data.splits import stratified
from fedld.data.table import read_column, read_features
from fedld.data.targets import target_facts
from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

if TYPE_CHECKING:
    from torch.utils.data import Dataset

Pair = tuple[Any, Any]
"""Samples and labels: NumPy arrays, torch tensors or nested lists."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """Clients with their data, a global test set, and the folder that holds the samples.

    Worker processes get the folder and map the same pages of `images.npy`; clients are sent as a few arrays,
    however many there are. Make one with `fedld.data(...)` or the `from_...` methods.

    Attributes:
        name: of the dataset.
        folder: holds images.npy and labels.npy.
        classes: names of the classes, labels or the target.
        clients: the clients, each with positions of its samples.
        test: positions of the global test set.
        mean, std: by channel, for normalisation.
        partition: how samples were divided among clients.
        skipped: files that were left out.
        notes: what a reader should know of how it was made.
        pixels: digest of all samples, where they are on this machine.
        spec: the settings it was made from, if it was not changed since.
        task: what is learned.
        groups: names of the groups that draws keep in proportion; empty: the classes.

    >>> import numpy as np
    >>> pictures, labels = np.zeros((10, 8, 8), np.uint8), [0, 1] * 5
    >>> sites = Federation.from_arrays({"berlin": (pictures, labels), "cairo": (pictures + 1, labels)})
    >>> [client.name for client in sites.clients], sites.input_shape
    (['berlin', 'cairo'], (1, 8, 8))
    """

    name: str
    folder: Path
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    test: Positions
    mean: tuple[float, ...]
    std: tuple[float, ...]
    partition: str = ""
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what a reader should know of how it was made
    pixels: str = ""  # digest of all pixels, where they are on this machine
    spec: DataSpec | None = None  # what it was made from, where nothing was changed since
    task: str = "classification"
    groups: tuple[str, ...] = ()  # names of what draws keep in proportion; none: the classes

    def __getstate__(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self)} | {
            "clients": pack(self.clients)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"clients": unpack(state["clients"])})

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Pair],
        test: Pair | None = None,
        *,
        classes: Sequence[str] | None = None,
        name: str = "arrays",
        task: str = "classification",
    ) -> "Federation":
        """Make a federation of arrays.

        Args:
            clients: by name (samples, targets). Samples are uint8 pictures (N, H, W) or (N, H, W, C), which
                are normalised, or floats of any shape (N, ...), which the model gets as they are.
            test: the test set in the same form; without it a fifth of all samples is drawn.
            classes: names of the classes, or of the K labels of "multilabel".
            name: of the federation.
            task: "classification" (targets are numbers from 0, or words), "regression" (numbers),
                "survival" ((N, 2) times and events), "multilabel" ((N, K) with 1, 0, or -1 for unknown) or
                "segmentation" (masks (N, H, W)).

        Returns:
            The federation; its samples are kept in the cache.

        Raises:
            FedLDError: samples and targets do not fit together, or are not finite.
        """
        from fedld.data.arrays import federation_from_arrays

        return federation_from_arrays(clients, test, classes, name, task=task)

    @classmethod
    def from_datasets(
        cls,
        clients: "Mapping[str, Dataset[Any] | Iterable[Any]]",
        test: "Dataset[Any] | Iterable[Any] | None" = None,
        *,
        classes: Sequence[str] | None = None,
        columns: tuple[str, str] | None = None,
        name: str = "datasets",
    ) -> "Federation":
        """Read clients' datasets once, and keep what they hold in the cache.

        Args:
            clients: by name a torch Dataset, a dataset of Hugging Face's `datasets`, or an iterable. Items
                are (sample, label) pairs, or mappings with the two.
            test: the test set in one of these forms; without it a fifth of all samples is drawn.
            classes: names of the classes; default: those that a Hugging Face dataset names.
            columns: names of sample and label in items that are mappings; default: image and label, or alike.
            name: of the federation.

        Returns:
            The federation.

        Raises:
            FedLDError: a dataset cannot be read, or its items do not fit together.
        """
        from fedld.data.arrays import federation_from_datasets

        return federation_from_datasets(clients, test, classes, name, columns=columns)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        target: str,
        *,
        site: str | None = None,
        split: str | None = None,
        drop: Sequence[str] = (),
        task: str = "classification",
        clients: int = 5,
        partition: str = "auto",
        seed: int = 0,
        name: str = "frame",
    ) -> "Federation":
        """Make a federation of a pandas or polars frame, one row per sample.

        Args:
            frame: columns by name. Numbers are features, texts categories; missing values are marked.
            target: column that is learned; of survival "TIME,EVENT".
            site: column that names clients; without it the rows are divided by `partition`.
            split: column with 'train' or 'test'; without it a fifth of the rows is drawn.
            drop: columns that are not used.
            task: classification, regression or survival.
            clients: number of clients, where no column names them.
            partition: how rows are divided, where no column names clients.
            seed: of that division.
            name: of the federation.

        Returns:
            The federation. A column named `patient` keeps its rows on one side of every split.

        Raises:
            FedLDError: no such column, or a cell cannot be used; its line is counted as in a CSV file.
        """
        from fedld.data.sheet import table_of_frame

        spec = DataSpec(
            dataset=name,
            task=task,
            target_column=target,
            site_column=site,
            split_column=split,
            drop=",".join(drop),
            clients=clients,
            partition=partition,
            seed=seed,
        )
        from fedld.data.datasets import federate

        return federate(table_of_frame(frame, spec), spec)

    @property
    def images(self) -> NDArray[Any]:
        """All samples, read-only: pixels (N, H, W, C), or a user's own floats of any shape."""
        return _map(self.folder / "images.npy")

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for one sample: one for each class."""
        return len(self.classes)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of these numbers: the classes, the labels, or the target's name."""
        return self.classes

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of what a model gives for one sample: (outputs,), or with masks (outputs, H, W)."""
        return (self.outputs, *self.labels.shape[1:]) if self.labels.ndim == 3 else (self.outputs,)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features of a table; none for pictures and own arrays."""
        return read_features(self.folder)

    @property
    def samples(self) -> str:
        """What samples are called: images, rows of a table, or samples of a user's own arrays."""
        if self.features:
            return "rows"
        return "images" if self.images.dtype == np.uint8 else "samples"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample as a model gets it: (channels, H, W) for pictures."""
        shape = self.images.shape[1:]
        return (shape[-1], *shape[:-1]) if len(shape) == 3 else shape

    @property
    def labels(self) -> NDArray[Any]:
        """All labels or other targets, (N, ...), read-only."""
        return _map(self.folder / "labels.npy")

    @property
    def strata(self) -> NDArray[np.int64]:
        """The group of every sample that draws keep in proportion: its class, where it has one."""
        column = read_column(self.folder, "group") if self.groups else None
        return self.labels if column is None else column.astype(np.int64)

    @property
    def strata_names(self) -> tuple[str, ...]:
        """Names of these groups."""
        return self.groups or self.classes

    def label_counts(self, names: Iterable[str] | None = None) -> NDArray[np.int64]:
        """Count training samples by client and class.

        Args:
            names: clients to count; default: all.

        Returns:
            (clients, classes) counts; 0 for classes of which a site does not tell the number.
        """
        chosen = self.clients if names is None else [self.client(name) for name in names]
        owner = np.repeat(np.arange(len(chosen)), [len(client.train) for client in chosen])
        labels = self.strata[np.concatenate([np.empty(0, np.int64), *(client.train for client in chosen)])]
        shape = len(chosen), len(self.strata_names)
        counts = np.bincount(owner * shape[1] + labels, minlength=math.prod(shape)).reshape(shape)
        for row, client in enumerate(chosen):
            if client.elsewhere:
                counts[row] = client.elsewhere
        return counts

    def client(self, name: str) -> Client:
        """Find a client by name.

        Args:
            name: its name.

        Returns:
            The client.

        Raises:
            KeyError: there is no such client.
        """
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Client]:
        return {client.name: client for client in self.clients}

    def hold_out(self, fraction: float, seed: int) -> "Federation":
        """Make a validation set of every client's training images the test set, for tuning.

        The draw is stratified by class, and a client keeps at least one training image. Where patients are
        known, no patient is on both sides.

        Args:
            fraction: share of the training images.
            seed: of the draw.

        Returns:
            A federation that does not contain the real test set.

        Raises:
            FedLDError: the fraction is not between 0 and 1, or takes no image or every patient of a client.
        """
        clients = []
        for client, taken in zip(self.clients, self._held_out(fraction, seed, "hold-out"), strict=True):
            clients.append(Client(name=client.name, train=client.train[~taken], test=client.train[taken]))
        test = np.sort(np.concatenate([client.test for client in clients]))
        return replace(self, clients=tuple(clients), test=test, spec=None)

    def take_fold(self, fold: int, folds: int, seed: int = 0) -> "Federation":
        """Make one fold of all clients' images the test set, for cross-validation.

        Args:
            fold: number of the fold that is tested, from 1.
            folds: how many folds there are.
            seed: of the assignment; the same for all folds.

        Returns:
            The federation with another split: whole patients are tested, and over all folds each image once.

        Raises:
            FedLDError: no such fold, too few patients, or a client without training images.
        """
        from fedld.data.splits import take_fold

        if not (folds >= 2 and 1 <= fold <= folds):
            raise FedLDError(f"There is no fold {fold} of {folds}")
        return take_fold(self, fold, folds, seed)

    def set_aside(self, fraction: float, seed: int) -> "Federation":
        """Set validation images aside at every client, drawn as by `hold_out`; the test set stays.

        Args:
            fraction: share of the training images.
            seed: of the draw.

        Returns:
            A federation with validation images at its clients.

        Raises:
            FedLDError: the fraction is not between 0 and 1, or takes no image or every patient of a client.
        """
        clients = []
        for client, taken in zip(self.clients, self._held_out(fraction, seed, "validation"), strict=True):
            train, validation = client.train[~taken], client.train[taken]
            clients.append(replace(client, train=train, validation=validation))
        return replace(self, clients=tuple(clients), spec=None)

    def _held_out(self, fraction: float, seed: int, purpose: str) -> list[NDArray[np.bool_]]:
        """Draw a mask of its training images for every client; at least one image is taken somewhere."""
        if not 0 < fraction < 1:
            raise FedLDError(f"The held-out fraction must lie between 0 and 1, not {fraction:g}")
        masks = list(self._masks(fraction, seed, purpose))
        if not any(mask.any() for mask in masks):
            raise FedLDError(f"A fraction of {fraction:g} holds out no image of '{self.name}'")
        return masks

    def _masks(self, fraction: float, seed: int, purpose: str) -> Iterator[NDArray[np.bool_]]:
        """Draw the masks one by one; patients are drawn once for all clients."""
        patients = self.patients
        if patients is not None:
            rows = np.concatenate([client.train for client in self.clients])
            rng = numpy_generator(seed, purpose, "patients")
            drawn = np.zeros(len(self.labels), bool)
            drawn[rows] = stratified(self.strata[rows], fraction, rng, patients[rows])
        for client in self.clients:
            if patients is not None:
                taken = drawn[client.train]
                if taken.all():
                    raise FedLDError(
                        f"A fraction of {fraction:g} would hold out every patient of '{client.name}'"
                    )
            else:
                rng = numpy_generator(seed, purpose, client.name)
                taken = stratified(self.strata[client.train], fraction, rng)
                if taken.all():
                    taken[0] = False
            yield taken

    @property
    def patients(self) -> NDArray[np.str_] | None:
        """The patient of every image, where the dataset names them."""
        return read_column(self.folder, "patient")

    def __repr__(self) -> str:
        """Return its name, task and sizes; positions of samples would fill screens."""
        training = sum(client.size for client in self.clients)
        counts = f"{len(self.clients)} clients, {training:,} training and {len(self.test):,} test samples"
        return f"<Federation '{self.name}', {self.task}: {counts}>"

    def describe(self) -> dict[str, Any]:
        """Summarise the federation as plain data, as `fedld data --json` prints it.

        Returns:
            Names, counts, shapes and notes.
        """
        return {
            "dataset": self.name,
            "partition": self.partition,
            "folder": str(self.folder),
            "task": self.task,
            "classes": list(self.strata_names),
            "image_shape": list(self.images.shape[1:]),
            "mean": list(self.mean),
            "std": list(self.std),
            "train": sum(client.size for client in self.clients),
            "test": len(self.test),
            "test_labels": np.bincount(self.strata[self.test], minlength=len(self.strata_names)).tolist(),
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "fingerprint": self.fingerprint(),
            "clients": [
                {
                    "name": client.name,
                    "train": client.size,
                    "test": len(client.test),
                    **({"validation": len(client.validation)} if len(client.validation) else {}),
                    "labels": None if client.untold else labels,
                    **({"targets": summary} if (summary := target_facts(self, client)) else {}),
                }
                for client, labels in zip(self.clients, self.label_counts().tolist(), strict=True)
            ],
        }

    def fingerprint(self) -> str:
        """Compute a digest of all that decides a result: samples, labels and how clients use them.

        Returns:
            A SHA-256 in hexadecimal digits.
        """
        constants = (self.classes, self.pixels, self.mean, self.std, [client.name for client in self.clients])
        digest, labels = sha256(repr(constants).encode()), self.labels
        kind = np.int64 if labels.dtype.kind in "iu" else np.float64
        parts = [rows for client in self.clients for rows in (client.train, client.test)]
        parts += [client.validation for client in self.clients if len(client.validation)]
        for rows in (self.test, *parts):
            digest.update(repr(len(rows)).encode())
            digest.update(np.ascontiguousarray(rows, np.int64).data)
            digest.update(np.ascontiguousarray(labels[rows], kind).data)
        for client in self.clients:
            if client.elsewhere:
                digest.update(repr((*client.elsewhere, client.untold)).encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def _map(file: Path) -> NDArray[Any]:
    """Map a file once per process."""
    array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array
