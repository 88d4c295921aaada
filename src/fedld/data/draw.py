"""Who is held out: a share of every class, and never a part of a patient.

`stratified` makes the fixed splits of a data set, `held_out` the draw of a round.
"""

import math

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]


def stratified(
    labels: Positions,
    fraction: float,
    rng: np.random.Generator,
    patients: NDArray[np.str_] | None = None,
) -> Mask:
    """Mask that takes `fraction` of every class; with `patients`, all images of a patient or none.

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
    own, sizes = _majorities(labels, number)
    place = np.empty(len(sizes))
    for label in np.unique(own):
        order = rng.permutation(np.flatnonzero(own == label))
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
    """Most frequent class and number of images of every patient."""
    votes = np.zeros((number.max() + 1, labels.max() + 1), np.int64)
    np.add.at(votes, (number, labels), 1)
    return votes.argmax(1), votes.sum(1)


def _whole_patients(
    labels: Positions, fraction: float, rng: np.random.Generator, patients: NDArray[np.str_]
) -> Mask:
    """Patients by their most frequent class, in random order, until a class has given its share."""
    taken = np.zeros(len(labels), bool)
    if not len(labels):
        return taken
    number = number_patients(patients)
    own, sizes = _majorities(labels, number)
    for label in np.unique(own):
        left = round(fraction * sizes[own == label].sum())
        for patient in rng.permutation(np.flatnonzero(own == label)):
            if not left:
                break
            if sizes[patient] <= left:
                taken[number == patient] = True
                left -= sizes[patient]
    return taken


def number_patients(patients: NDArray[np.str_]) -> Positions:
    """A number per patient; an image without a name is a patient of its own.

    >>> number_patients(np.array(["a", "", "a", ""])).tolist()
    [0, 1, 0, 2]
    """
    known, number = np.unique(patients, return_inverse=True)
    number = number.astype(np.int64)
    nameless = np.flatnonzero(patients == "")
    number[nameless] = len(known) + np.arange(len(nameless))
    compact: Positions = np.unique(number, return_inverse=True)[1].astype(np.int64)
    return compact
