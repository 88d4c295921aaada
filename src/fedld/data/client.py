"""Clients; and thousands of them as a few arrays, since each alone costs kilobytes on its way to a worker."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
NO_IMAGES: Positions = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Client:
    """One site: sorted positions of its images in `Federation.images`.

    Where the training images stay at the site, `train` is empty. Known of them are `elsewhere`, the number of
    each class; `untold`, the number of images in classes with undisclosed counts; and `target_sums` over
    their targets, where a task needs some.
    `validation` images are not trained on: they choose the best round, where a run sets some aside.
    """

    name: str
    train: Positions
    test: Positions
    elsewhere: tuple[int, ...] = ()
    validation: Positions = field(default_factory=lambda: NO_IMAGES)
    untold: int = 0
    target_sums: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of training images."""
        return len(self.train) + sum(self.elsewhere) + self.untold


Elsewhere = dict[int, tuple[tuple[int, ...], int, Mapping[str, float]]]
Packed = tuple[tuple[str, ...], Elsewhere, tuple[tuple[Positions, Positions], ...]]
"""Names; by number what is known of images elsewhere; for each kind of images their numbers and positions."""


def pack(clients: Sequence[Client]) -> Packed:
    """Pack all clients' positions one after the other, with the number of each."""
    kinds = ([getattr(client, kind) for client in clients] for kind in ("train", "test", "validation"))
    rows = tuple((np.array(list(map(len, k)), np.int64), np.concatenate([NO_IMAGES, *k])) for k in kinds)
    elsewhere = {
        i: (client.elsewhere, client.untold, client.target_sums)
        for i, client in enumerate(clients)
        if client.elsewhere
    }
    return tuple(client.name for client in clients), elsewhere, rows


def unpack(packed: Packed) -> tuple[Client, ...]:
    """Unpack the clients; their positions are views of common arrays."""
    names, elsewhere, rows = packed
    kinds = zip(*(_parts(*kind) for kind in rows), strict=True)
    clients = []
    for i, (name, (train, test, validation)) in enumerate(zip(names, kinds, strict=True)):
        counts, untold, sums = elsewhere.get(i, ((), 0, {}))
        clients.append(
            Client(
                name=name,
                train=train,
                test=test,
                elsewhere=counts,
                validation=validation,
                untold=untold,
                target_sums=sums,
            )
        )
    return tuple(clients)


def _parts(counts: Positions, rows: Positions) -> Iterator[Positions]:
    start = 0
    for count in counts.tolist():
        yield rows[start : start + count] if count else NO_IMAGES
        start += count
