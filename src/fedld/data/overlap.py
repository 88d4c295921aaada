"""The same picture, or the same patient, in two places that should know nothing of each other."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedld.data.client import Client
from fedld.data.table import Table

Positions = NDArray[np.int64]


def repeated(hashes: NDArray[np.void], clients: Sequence[Client], test: Positions) -> Iterator[str]:
    """Sentences on pictures that are equal to the last pixel, in training and test or at two clients."""
    _, number = np.unique(hashes, return_inverse=True)
    seen = np.zeros(number.max() + 1, bool)
    seen[number[np.concatenate([client.train for client in clients])]] = True
    both = int(seen[number[test]].sum())
    if both:
        yield f"{both} of {len(test)} test images are also training images, to the last pixel"
    holders = np.zeros(len(seen), np.int64)
    for client in clients:
        holders[np.unique(number[client.train])] += 1
    shared = int((holders > 1).sum())
    if shared:
        yield f"{shared} different images are held by more than one client"


def parted(table: Table, train: Positions, test: Positions) -> Iterator[str]:
    """A sentence where the dataset's own split has a patient on both sides."""
    if "patient" in table.columns:
        patients = table.columns["patient"]
        both = (set(patients[train]) & set(patients[test])) - {""}
        if both:
            yield f"{len(both)} patients have images in training and test, the first is '{min(both)}'"
