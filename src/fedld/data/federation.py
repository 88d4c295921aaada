"""The Federation: every client's images as positions in one memory-mapped array, and one global test set."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Client:
    """One site: sorted positions of its images in `Federation.images`."""

    name: str
    train: Positions
    test: Positions


@dataclass(frozen=True, eq=False)
class Federation:
    """Clients, a global test set, and the folder that holds the pixels.

    Only the folder travels to a worker process; each process maps the same pages of `images.npy`.
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

    @property
    def images(self) -> NDArray[np.uint8]:
        """All pixels, (N, H, W, C), read-only."""
        return _map(self.folder / "images.npy")

    @property
    def labels(self) -> NDArray[np.int64]:
        """All labels, (N,), read-only."""
        return _map(self.folder / "labels.npy")

    def label_counts(self) -> NDArray[np.int64]:
        """Training images by client and class, (clients, classes)."""
        return np.stack([self._count(client.train) for client in self.clients])

    def hold_out(self, fraction: float, seed: int) -> "Federation":
        """Take a validation set from every client's training images; it becomes the test set of the result.

        Whatever is tuned on the result never sees the real test set. The draw is stratified by class, and
        a client keeps at least one training image.
        """
        if not 0 < fraction < 1:
            raise FedLDError(f"The held-out fraction must lie between 0 and 1, not {fraction:g}.")
        clients = []
        for client in self.clients:
            rng = numpy_generator(seed, "hold-out", client.name)
            taken = stratified(self.labels[client.train], fraction, rng)
            if taken.all():
                taken[0] = False
            clients.append(Client(client.name, client.train[~taken], client.train[taken]))
        test = np.sort(np.concatenate([client.test for client in clients]))
        if not len(test):
            raise FedLDError(f"A fraction of {fraction:g} holds out no image of '{self.name}'.")
        return replace(self, clients=tuple(clients), test=test)

    def describe(self) -> dict[str, Any]:
        """Plain-data summary: what `fedld data --json` prints."""
        return {
            "dataset": self.name,
            "partition": self.partition,
            "folder": str(self.folder),
            "classes": list(self.classes),
            "image_shape": list(self.images.shape[1:]),
            "mean": list(self.mean),
            "std": list(self.std),
            "train": sum(len(client.train) for client in self.clients),
            "test": len(self.test),
            "test_labels": self._count(self.test).tolist(),
            "skipped": list(self.skipped),
            "clients": [
                {
                    "name": client.name,
                    "train": len(client.train),
                    "test": len(client.test),
                    "labels": self._count(client.train).tolist(),
                }
                for client in self.clients
            ],
        }

    def _count(self, positions: Positions) -> NDArray[np.int64]:
        return np.bincount(self.labels[positions], minlength=len(self.classes))


def stratified(labels: Positions, fraction: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mask that takes `fraction` of every class.

    >>> stratified(np.array([0, 0, 0, 0, 1, 1]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    taken = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        taken[members[: round(fraction * len(members))]] = True
    return taken


@lru_cache(maxsize=64)
def _map(file: Path) -> NDArray[Any]:
    """One map a process and file."""
    array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array
