"""Clients; and thousands of them as a few arrays, since each alone costs kilobytes on its way to a worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
NO_IMAGES: Positions = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Client:
    """One site: sorted positions of its images in `Federation.images`.

    Where the training images stay at the site, `train` is empty, and of them no more is known here than
    `elsewhere`: how many there are of each class.
    Nobody trains on the `validation` images: they choose the best round, where a run sets some aside.
    """

    name: str
    train: Positions
    test: Positions
    elsewhere: tuple[int, ...] = ()
    validation: Positions = field(default_factory=lambda: NO_IMAGES)

    @property
    def size(self) -> int:
        """Number of training images."""
        return len(self.train) + sum(self.elsewhere)


Packed = tuple[tuple[str, ...], dict[int, tuple[int, ...]], tuple[tuple[Positions, Positions], ...]]
"""Names, what is `elsewhere` by number, and for each kind of images their numbers and positions."""


def pack(clients: Sequence[Client]) -> Packed:
    """All clients' positions one after the other, and how many each has."""
    kinds = ([getattr(one, kind) for one in clients] for kind in ("train", "test", "validation"))
    rows = tuple((np.array(list(map(len, k)), np.int64), np.concatenate([NO_IMAGES, *k])) for k in kinds)
    elsewhere = {i: client.elsewhere for i, client in enumerate(clients) if client.elsewhere}
    return tuple(client.name for client in clients), elsewhere, rows


def unpack(packed: Packed) -> tuple[Client, ...]:
    """The clients again; their positions are views of common arrays."""
    names, elsewhere, rows = packed
    kinds = zip(*(_parts(*one) for one in rows), strict=True)
    return tuple(
        Client(name, train, test, elsewhere.get(i, ()), validation)
        for i, (name, (train, test, validation)) in enumerate(zip(names, kinds, strict=True))
    )


def _parts(counts: Positions, rows: Positions) -> Iterator[Positions]:
    start = 0
    for count in counts.tolist():
        yield rows[start : start + count] if count else NO_IMAGES
        start += count
