"""Cross-validation: every image is tested once, and a patient's images are in one fold."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedld.data.client import Client, Positions
from fedld.data.draw import number_patients
from fedld.data.overlap import repeated
from fedld.data.table import read_table
from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

if TYPE_CHECKING:
    from fedld.data.federation import Federation


def assign_folds(
    strata: Positions, folds: int, rng: np.random.Generator, patients: NDArray[np.str_] | None = None
) -> Positions:
    """Give every image the number of its fold.

    Patients are taken stratum by stratum in random order, large ones first. Each goes to the fold that has
    the fewest images of the stratum, and of those to the smallest fold.

    Args:
        strata: the group of every image that each fold gets its share of.
        folds: how many folds there are.
        rng: source of the order.
        patients: the patient of every image ("" for an image without one), or None.

    Returns:
        For every image a number from 1 to `folds`.

    >>> np.bincount(assign_folds(np.arange(30) % 3, 5, np.random.default_rng(0))).tolist()
    [0, 6, 6, 6, 6, 6]
    """
    number = np.arange(len(strata)) if patients is None else number_patients(patients)
    first = np.unique(number, return_index=True)[1]
    sizes = np.bincount(number)
    fold = np.zeros(len(sizes), np.int64)
    total = [0] * folds
    for stratum in np.unique(strata[first]):
        order = rng.permutation(np.flatnonzero(strata[first] == stratum))
        order = order[np.argsort(-sizes[order], kind="stable")]
        own = [0] * folds
        for patient in order.tolist():
            chosen = min(range(folds), key=lambda k: (own[k], total[k]))
            fold[patient] = chosen + 1
            own[chosen] += int(sizes[patient])
            total[chosen] += int(sizes[patient])
    return fold[number]


def take_fold(federation: "Federation", fold: int, folds: int, seed: int) -> "Federation":
    """Make one fold of all clients' images the test set; the other folds are trained on.

    Args:
        federation: its clients' training, validation and test images are all used.
        fold: number of the fold that is tested, from 1.
        folds: how many folds there are.
        seed: of the assignment; the same for all folds of a cross-validation.

    Returns:
        The federation with another split. Images are normalised by its training images.

    Raises:
        FedLDError: there are too few patients, or a client has no image left to train on.
    """
    rows = [np.sort(np.concatenate([c.train, c.validation, c.test])) for c in federation.clients]
    everything = np.concatenate(rows)
    strata = federation.strata[everything]
    if federation.partition == "site" or federation.partition.startswith("column:"):
        owner = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
        strata = owner * len(federation.strata_names) + strata
    patients = None if federation.patients is None else federation.patients[everything]
    count = len(everything) if patients is None else number_patients(patients).max() + 1
    if count < folds:
        what = "images" if patients is None else "patients"
        raise FedLDError(f"{folds} folds need {folds} {what}, and '{federation.name}' has {count}.")
    number = np.zeros(len(federation.labels), np.int64)
    number[everything] = assign_folds(strata, folds, numpy_generator(seed, "folds"), patients)
    clients = []
    for client, own in zip(federation.clients, rows, strict=True):
        train, test = own[number[own] != fold], own[number[own] == fold]
        if not len(train):
            raise FedLDError(f"Fold {fold} of {folds} leaves '{client.name}' without training images.")
        clients.append(Client(client.name, train, test))
    table = read_table(federation.folder)
    mean, std = table.statistics([client.train for client in clients])
    test = np.sort(np.concatenate([client.test for client in clients]))
    notes = (*federation.notes, *repeated(table.hashes(), clients, test), *_unused(federation, everything))
    return replace(
        federation,
        clients=tuple(clients),
        test=test,
        mean=mean,
        std=std,
        notes=tuple(dict.fromkeys(notes)),
        spec=None,
    )


def _unused(federation: "Federation", everything: Positions) -> Iterator[str]:
    """Say how many test images are in no fold, since no client has them."""
    left = np.setdiff1d(federation.test, everything)
    if len(left):
        yield f"{len(left)} test images belong to no client and are in no fold"
