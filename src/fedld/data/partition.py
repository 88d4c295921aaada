"""Partitions: pure functions from the labels of the training images to one index array per client.

Every function guarantees `min_size` images per client or ends in a clear error; none can loop without end.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.registry import Registry, call_with, name_of, require_callable
from fedld.seeds import numpy_generator

Indices = NDArray[np.int64]
TRIES = 100


def partition(
    name: str,
    labels: Indices,
    clients: int,
    *,
    alpha: float = 0.5,
    classes_per_client: int = 2,
    min_size: int = 10,
    seed: int = 0,
) -> list[Indices]:
    """Split the images among `clients` by the partition called `name`.

    >>> [len(part) for part in partition("iid", np.arange(30) % 3, clients=2)]
    [15, 15]
    """
    options = {
        "clients": clients,
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "min_size": min_size,
        "seed": seed,
    }
    function = PARTITIONS.find(name)
    if name in BUILT_IN:
        parts: list[Indices] = call_with(function, "partition", labels=labels, **options)
        return parts
    return own_partition(function, labels, **options)


def own_partition(function: Callable[..., Sequence[Any]], labels: Indices, **options: Any) -> list[Indices]:
    """Divide labels by a user's function, which may ask by name for the options.

    >>> halves = own_partition(lambda labels, clients: np.array_split(np.arange(len(labels)), clients),
    ...                        np.zeros(4, int), clients=2)
    >>> [part.tolist() for part in halves]
    [[0, 1], [2, 3]]
    """
    name = name_of(function)
    returned = call_with(function, "partition", labels=labels, **options)
    parts: list[Any] = [
        np.asarray(part) for part in (returned if isinstance(returned, Iterable) else [returned])
    ]
    if any(part.ndim != 1 or (part.size and part.dtype.kind not in "iu") for part in parts):
        raise FedLDError(f"partition '{name}' does not give one array of places per client")
    places = np.concatenate([np.empty(0, np.int64), *parts])
    if not len(places):
        raise FedLDError(f"partition '{name}' gives no client an image")
    if any(not len(part) for part in parts):
        raise FedLDError(f"partition '{name}' leaves client {[len(p) for p in parts].index(0) + 1} empty")
    if len(np.unique(places)) < len(places) or places.min() < 0 or places.max() >= len(labels):
        raise FedLDError(f"partition '{name}' gives a place twice, or one beyond the {len(labels)} images")
    return _sorted(parts)


def iid(labels: Indices, clients: int, *, min_size: int = 10, seed: int = 0) -> list[Indices]:
    """Draw equal shares at random."""
    _check_room(len(labels), clients, min_size)
    order = numpy_generator(seed, "partition", "iid").permutation(len(labels))
    return _sorted(np.array_split(order, clients))


def dirichlet(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Label skew: every class is cut by its own Dirichlet(alpha) shares; small alpha, strong skew.

    Draws that leave a client below `min_size` are drawn again; where that fails (a tiny alpha),
    the draw with the largest smallest client is repaired with images of the largest clients.
    """
    best, _ = _best_draw(labels, clients, alpha, min_size, seed=seed)
    return _sorted(_fill_up(best, min_size))


def dirichlet_raw(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Take the first draw of `dirichlet`; raises an error where a client has fewer than `min_size` images."""
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    parts = _draw(labels, clients, alpha, numpy_generator(seed, "partition", "dirichlet")).parts()
    least = min(map(len, parts))
    if least < min_size:
        raise FedLDError(
            f"At alpha {alpha:g} and seed {seed} the smallest of {clients} clients draws {least} images, "
            f"fewer than min_size {min_size}; take another seed, a larger alpha, or dirichlet, which repairs"
        )
    return _sorted(parts)


def repair(labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0) -> str | None:
    """Describe how `dirichlet` gave every client its images; None where the first draw was good."""
    best, tries = _best_draw(labels, clients, alpha, min_size, seed=seed)
    repaired = _fill_up(best, min_size)
    moved = sum(len(np.setdiff1d(new, old)) for old, new in zip(best, repaired, strict=True))
    if moved:
        return (
            f"none of {tries} draws gave every client {min_size} images: the best was repaired, {moved} of "
            f"{len(labels)} images changed their client"
        )
    return f"draw {tries} is the first that gave every client {min_size} images" if tries > 1 else None


def _best_draw(
    labels: Indices, clients: int, alpha: float, min_size: int, seed: int
) -> tuple[list[Indices], int]:
    """Take the first draw in which every client has enough, else the best of many; and count them."""
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    return _drawn(np.ascontiguousarray(labels, np.int64).tobytes(), clients, alpha, min_size, seed=seed)


@lru_cache(maxsize=1)
def _drawn(content: bytes, clients: int, alpha: float, min_size: int, seed: int) -> tuple[list[Indices], int]:
    """Draw once and cache: for the parts, and for the note on how they were drawn."""
    labels = np.frombuffer(content, np.int64)
    rng = numpy_generator(seed, "partition", "dirichlet")
    best, tries = _draw(labels, clients, alpha, rng), 1
    while tries < TRIES and best.smallest < min_size:
        tries += 1
        best = max(best, _draw(labels, clients, alpha, rng), key=lambda draw: draw.smallest)
    return best.parts(), tries


def dirichlet_sslfl(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 2022
) -> list[Indices]:
    """Label skew as the SSL-FL project drew it; `seed` 2022 gives the published Retina client lists.

    The published lists come from NumPy's legacy generator, so this one function uses it (a private copy).
    A client that already holds its even share gets nothing more of the next class.
    """
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    legacy = np.random.RandomState(seed)
    for _ in range(10 * TRIES):
        parts = _cut_classes_sslfl(labels, clients, alpha, legacy)
        if min(map(len, parts)) >= min_size:
            return _sorted(parts)
    raise FedLDError(
        f"Partition dirichlet-sslfl found no draw that gives {clients} clients at least {min_size} images "
        f"each at alpha {alpha:g}; take a larger alpha, fewer clients, or partition dirichlet"
    )


def quantity(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Skew quantity: labels at random, sizes `min_size` plus Dirichlet(alpha) shares of the rest."""
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    rng = numpy_generator(seed, "partition", "quantity")
    spare = len(labels) - clients * min_size
    cuts = _cuts(_shares(rng, clients, alpha), spare) + min_size * np.arange(1, clients)
    return _sorted(np.split(rng.permutation(len(labels)), cuts))


def classes(
    labels: Indices, clients: int, classes_per_client: int, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Give every client `classes_per_client` classes; the clients that have a class share it evenly."""
    _check_room(len(labels), clients, min_size)
    rng = numpy_generator(seed, "partition", "classes")
    kinds = rng.permutation(np.unique(labels))
    if not 1 <= classes_per_client <= len(kinds):
        raise FedLDError(
            f"classes_per_client must be between 1 and {len(kinds)} (the classes of this dataset), "
            f"not {classes_per_client}"
        )
    if clients * classes_per_client < len(kinds):
        raise FedLDError(
            f"{clients} clients with {classes_per_client} classes each cannot hold all {len(kinds)} classes"
        )
    # Client i takes the next classes_per_client classes around the circle, so every class finds an owner.
    owned = np.arange(clients * classes_per_client) % len(kinds)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for kind, label in enumerate(kinds):
        owners = np.flatnonzero(owned == kind) // classes_per_client
        members = rng.permutation(np.flatnonzero(labels == label))
        for owner, share in zip(owners, np.array_split(members, len(owners)), strict=True):
            parts[owner].append(share)
    joined = [np.concatenate(part) for part in parts]
    if min(map(len, joined)) < min_size:
        raise FedLDError(
            f"With {classes_per_client} classes per client the smallest of {clients} clients would hold only "
            f"{min(map(len, joined))} images, fewer than min_size {min_size}"
        )
    return _sorted(joined)


@dataclass(frozen=True)
class _Draw:
    """Every class in random order, and where it is cut; of most draws only the sizes are looked at."""

    classes: list[Indices]
    cuts: list[Indices]

    @property
    def smallest(self) -> int:
        """Images of the client that has the fewest."""
        ends = zip(self.cuts, self.classes, strict=True)
        sizes = sum(np.diff(cuts, prepend=0, append=len(members)) for cuts, members in ends)
        return int(np.min(sizes))

    def parts(self) -> list[Indices]:
        """Collect the images of every client, class by class."""
        shares = [np.split(members, cuts) for members, cuts in zip(self.classes, self.cuts, strict=True)]
        return [np.concatenate(part) for part in zip(*shares, strict=True)]


def _draw(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> _Draw:
    draw = _Draw([], [])
    for label in np.unique(labels):
        draw.classes.append(rng.permutation(np.flatnonzero(labels == label)))
        draw.cuts.append(_cuts(_shares(rng, clients, alpha), len(draw.classes[-1])))
    return draw


def _cut_classes_sslfl(
    labels: Indices, clients: int, alpha: float, legacy: np.random.RandomState
) -> list[Indices]:
    parts = [np.empty(0, np.int64) for _ in range(clients)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        legacy.shuffle(members)
        shares = legacy.dirichlet(np.repeat(alpha, clients))
        shares *= [len(part) < len(labels) / clients for part in parts]
        if not shares.sum() > 0:  # all mass fell on full clients: a failed draw, tried again
            return [np.empty(0, np.int64)] * clients
        cuts = (np.cumsum(shares / shares.sum()) * len(members)).astype(int)[:-1]
        parts = [np.concatenate(pair) for pair in zip(parts, np.split(members, cuts), strict=True)]
    return parts


def _shares(rng: np.random.Generator, clients: int, alpha: float) -> NDArray[np.float64]:
    return rng.dirichlet(np.full(clients, alpha))


def _cuts(shares: NDArray[np.float64], count: int) -> Indices:
    return np.rint(np.cumsum(shares)[:-1] * count).clip(0, count).astype(np.int64)


def _fill_up(parts: list[Indices], min_size: int) -> list[Indices]:
    """Move images from the largest client to every client below `min_size`; ends, since there is room."""
    parts = list(parts)
    largest = [(-len(part), i) for i, part in enumerate(parts)]  # a heap: of equal ones the first
    heapq.heapify(largest)
    for poor in range(len(parts)):
        while (need := min_size - len(parts[poor])) > 0:
            size, rich = -largest[0][0], largest[0][1]
            give = min(need, max(1, (size - min_size) // 2))
            parts[poor] = np.concatenate([parts[poor], parts[rich][-give:]])
            parts[rich] = parts[rich][:-give]
            heapq.heapreplace(largest, (give - size, rich))
    return parts


def _sorted(parts: Sequence[Indices]) -> list[Indices]:
    return [np.sort(part).astype(np.int64) for part in parts]


def _check_room(samples: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise FedLDError(f"A federation needs at least one client, not {clients}")
    if min_size < 1:
        raise FedLDError(f"min_size must be at least 1, not {min_size}")
    if clients > samples:
        raise FedLDError(f"{clients} clients cannot share {samples} training images")
    if clients * min_size > samples:
        raise FedLDError(
            f"{clients} clients with at least {min_size} images each need {clients * min_size} training "
            f"images, but there are {samples}"
        )


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and 1e-6 <= alpha <= 1e6):
        raise FedLDError(f"alpha must be a positive number between 1e-6 and 1e6, not {alpha:g}")


def _published_lists(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Call `dirichlet_sslfl` so that seed 0 gives the published client lists."""
    return dirichlet_sslfl(labels, clients, alpha, min_size=min_size, seed=(2022 + seed) % 2**32)


BUILT_IN: dict[str, Callable[..., list[Indices]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-raw": dirichlet_raw,
    "dirichlet-sslfl": _published_lists,
    "quantity": quantity,
    "classes": classes,
}
PARTITIONS: Registry[Callable[..., Sequence[Any]]] = Registry(
    "partition",
    BUILT_IN,
    accept=require_callable("partition", "or a function from labels to one array of places per client"),
    reserved=("auto", "site", "column:"),
)
PARTITIONS.load_plugins()
