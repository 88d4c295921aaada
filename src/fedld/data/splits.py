"""Splits: held-out shares of every class, folds, and checks for images or patients in two places.

A patient's images are never divided. `stratified` makes the fixed splits of a dataset, `held_out` the draw of
a round, `take_fold` a fold of a cross-validation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedld.data.client import Client, Positions
from fedld.data.table import Table, read_table
from fedld.errors import FedLDError
from fedld.seeds import numpy_generator

if TYPE_CHECKING:
    from fedld.data.federation import Federation


Mask = NDArray[np.bool_]


def stratified(
    labels: Positions,
    fraction: float,
    rng: np.random.Generator,
    patients: NDArray[np.str_] | None = None,
) -> Mask:
    """Draw a mask of `fraction` of every class; with `patients`, all images of a patient or none.

    >>> stratified(np.array([0, 0, 0, 0, 1, 1]), 0.5, np.random.default_rng(0)).sum()
    np.int64(3)
    """
    if patients is not None:
        return _whole_patients(labels, fraction, rng, patients)
    taken = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        taken[members[: round(fraction * len(members))]] = True
    return taken


def held_out(
    labels: Positions,
    fraction: float,
    rng: np.random.Generator,
    patients: NDArray[np.str_] | None = None,
) -> Mask:
    """Draw at most `fraction` of the images, each with the same chance, from all classes in proportion.

    In every class the images stand in random order, evenly spread over [0, 1], and those nearest to 0 are
    taken: remainders of small classes add up instead of being rounded away. With `patients` all images of a
    patient are taken or none; a patient with more images than may be taken is left where it is.

    Args:
        labels: Class of every image.
        fraction: Largest share of the images that is taken.
        rng: Source of the draw.
        patients: Patient of every image ("" for an image without one), or None.

    Returns:
        Mask of the images that are taken.

    >>> int(held_out(np.arange(20).repeat(3), 0.2, np.random.default_rng(0)).sum())  # 20 classes of 3
    12
    """
    taken = np.zeros(len(labels), bool)
    if not len(labels):
        return taken
    number = np.arange(len(labels)) if patients is None else number_patients(patients)
    majority, sizes = _majorities(labels, number)
    place = np.empty(len(sizes))
    for label in np.unique(majority):
        order = rng.permutation(np.flatnonzero(majority == label))
        ends = sizes[order].cumsum()
        place[order] = (ends - rng.random(len(order)) * sizes[order]) / ends[-1]
    left = math.floor(fraction * len(labels) + 1e-9)
    chosen = np.zeros(len(sizes), bool)
    for patient in place.argsort().tolist():
        if sizes[patient] <= left:
            chosen[patient] = True
            left -= sizes[patient]
        if not left:
            break
    return chosen[number]


def _majorities(labels: Positions, number: Positions) -> tuple[Positions, Positions]:
    """Count the images of every patient, and find the most frequent class."""
    votes = np.zeros((number.max() + 1, labels.max() + 1), np.int64)
    np.add.at(votes, (number, labels), 1)
    return votes.argmax(1), votes.sum(1)


def _whole_patients(
    labels: Positions, fraction: float, rng: np.random.Generator, patients: NDArray[np.str_]
) -> Mask:
    """Draw patients by their most frequent class, in random order, until a class has given its share."""
    taken = np.zeros(len(labels), bool)
    if not len(labels):
        return taken
    number = number_patients(patients)
    majority, sizes = _majorities(labels, number)
    for label in np.unique(majority):
        left = round(fraction * sizes[majority == label].sum())
        for patient in rng.permutation(np.flatnonzero(majority == label)):
            if not left:
                break
            if sizes[patient] <= left:
                taken[number == patient] = True
                left -= sizes[patient]
    return taken


def number_patients(patients: NDArray[np.str_]) -> Positions:
    """Number the patients; an image without a name is a patient of its own.

    >>> number_patients(np.array(["a", "", "a", ""])).tolist()
    [0, 1, 0, 2]
    """
    names, number = np.unique(patients, return_inverse=True)
    number = number.astype(np.int64)
    nameless = np.flatnonzero(patients == "")
    number[nameless] = len(names) + np.arange(len(nameless))
    compact: Positions = np.unique(number, return_inverse=True)[1].astype(np.int64)
    return compact


def repeated(hashes: NDArray[np.void], clients: Sequence[Client], test: Positions) -> Iterator[str]:
    """Warn of pictures that are equal to the last pixel, in training and test or at two clients."""
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
    """Warn where the dataset's own split has a patient on both sides."""
    if "patient" in table.columns:
        patients = table.columns["patient"]
        both = (set(patients[train]) & set(patients[test])) - {""}
        if both:
            yield f"{len(both)} patients have images in training and test, the first is '{min(both)}'"


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
        counts = [0] * folds
        for patient in order.tolist():
            chosen = min(range(folds), key=lambda k: (counts[k], total[k]))
            fold[patient] = chosen + 1
            counts[chosen] += int(sizes[patient])
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
        owner = np.repeat(np.arange(len(rows)), [len(positions) for positions in rows])
        strata = owner * len(federation.strata_names) + strata
    patients = None if federation.patients is None else federation.patients[everything]
    count = len(everything) if patients is None else number_patients(patients).max() + 1
    if count < folds:
        what = "images" if patients is None else "patients"
        raise FedLDError(f"{folds} folds need {folds} {what}, and '{federation.name}' has {count}")
    number = np.zeros(len(federation.labels), np.int64)
    number[everything] = assign_folds(strata, folds, numpy_generator(seed, "folds"), patients)
    clients = []
    for client, positions in zip(federation.clients, rows, strict=True):
        train, test = positions[number[positions] != fold], positions[number[positions] == fold]
        if not len(train):
            raise FedLDError(f"Fold {fold} of {folds} leaves '{client.name}' without training images")
        clients.append(Client(name=client.name, train=train, test=test))
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
