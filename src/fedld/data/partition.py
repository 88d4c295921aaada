"""Partitions: pure functions from the labels of the training images to one index array per client.

Every function guarantees `min_size` images a client or ends in a clear error; none can loop without end.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError, nearest
from fedld.seeds import numpy_generator

Indices = NDArray[np.int64]
PARTITIONS = ("iid", "dirichlet", "dirichlet-sslfl", "quantity", "classes")
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
    match name:
        case "iid":
            return iid(labels, clients, min_size=min_size, seed=seed)
        case "dirichlet":
            return dirichlet(labels, clients, alpha, min_size=min_size, seed=seed)
        case "dirichlet-sslfl":
            return dirichlet_sslfl(labels, clients, alpha, min_size=min_size, seed=(2022 + seed) % 2**32)
        case "quantity":
            return quantity(labels, clients, alpha, min_size=min_size, seed=seed)
        case "classes":
            return classes(labels, clients, classes_per_client, min_size=min_size, seed=seed)
    raise FedLDError(
        f"There is no partition '{name}': {nearest(name, [*PARTITIONS, 'auto', 'site', 'column:NAME'])}."
    )


def iid(labels: Indices, clients: int, *, min_size: int = 10, seed: int = 0) -> list[Indices]:
    """Equal shares, drawn at random."""
    _check_room(len(labels), clients, min_size)
    order = numpy_generator(seed, "partition", "iid").permutation(len(labels))
    return _sorted(np.array_split(order, clients))


def dirichlet(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Label skew: every class is cut by its own Dirichlet(alpha) shares; small alpha, strong skew.

    Draws that leave a client below `min_size` are drawn again; where that is hopeless (a tiny alpha) the
    draw with the fullest smallest client is repaired with images of the largest clients.
    """
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    rng = numpy_generator(seed, "partition", "dirichlet")
    best: list[Indices] = []
    for _ in range(TRIES):
        parts = _cut_classes(labels, clients, alpha, rng)
        if not best or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, best)) >= min_size:
            break
    return _sorted(_fill_up(best, min_size))


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
        f"each at alpha {alpha:g}; take a larger alpha, fewer clients, or partition dirichlet."
    )


def quantity(
    labels: Indices, clients: int, alpha: float, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Quantity skew: labels at random, sizes `min_size` plus Dirichlet(alpha) shares of the rest."""
    _check_room(len(labels), clients, min_size)
    _check_alpha(alpha)
    rng = numpy_generator(seed, "partition", "quantity")
    spare = len(labels) - clients * min_size
    cuts = _cuts(_shares(rng, clients, alpha), spare) + min_size * np.arange(1, clients)
    return _sorted(np.split(rng.permutation(len(labels)), cuts))


def classes(
    labels: Indices, clients: int, classes_per_client: int, *, min_size: int = 10, seed: int = 0
) -> list[Indices]:
    """Every client sees `classes_per_client` classes; the clients that have a class share it evenly."""
    _check_room(len(labels), clients, min_size)
    rng = numpy_generator(seed, "partition", "classes")
    kinds = rng.permutation(np.unique(labels))
    if not 1 <= classes_per_client <= len(kinds):
        raise FedLDError(
            f"classes_per_client must be between 1 and {len(kinds)} (the classes of this dataset), "
            f"not {classes_per_client}."
        )
    if clients * classes_per_client < len(kinds):
        raise FedLDError(
            f"{clients} clients with {classes_per_client} classes each cannot hold all {len(kinds)} classes."
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
            f"{min(map(len, joined))} images, fewer than min_size {min_size}."
        )
    return _sorted(joined)


def _cut_classes(labels: Indices, clients: int, alpha: float, rng: np.random.Generator) -> list[Indices]:
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        for part, share in zip(
            parts, np.split(members, _cuts(_shares(rng, clients, alpha), len(members))), strict=True
        ):
            part.append(share)
    return [np.concatenate(part) for part in parts]


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
    for poor in range(len(parts)):
        while (need := min_size - len(parts[poor])) > 0:
            rich = max(range(len(parts)), key=lambda i: len(parts[i]))
            give = min(need, max(1, (len(parts[rich]) - min_size) // 2))
            parts[poor] = np.concatenate([parts[poor], parts[rich][-give:]])
            parts[rich] = parts[rich][:-give]
    return parts


def _sorted(parts: Sequence[Indices]) -> list[Indices]:
    return [np.sort(part).astype(np.int64) for part in parts]


def _check_room(samples: int, clients: int, min_size: int) -> None:
    if clients < 1:
        raise FedLDError(f"A federation needs at least one client, not {clients}.")
    if min_size < 1:
        raise FedLDError(f"min_size must be at least 1, not {min_size}.")
    if clients > samples:
        raise FedLDError(f"{clients} clients cannot share {samples} training images.")
    if clients * min_size > samples:
        raise FedLDError(
            f"{clients} clients with at least {min_size} images each need {clients * min_size} training "
            f"images, but there are {samples}."
        )


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and 1e-6 <= alpha <= 1e6):
        raise FedLDError(f"alpha must be a positive number between 1e-6 and 1e6, not {alpha:g}.")
