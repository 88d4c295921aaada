"""Who is held out: a share of every class, and never a part of a patient."""

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


def _whole_patients(
    labels: Positions, fraction: float, rng: np.random.Generator, patients: NDArray[np.str_]
) -> Mask:
    """Patients by their most frequent class, in random order, until a class has given its share."""
    taken = np.zeros(len(labels), bool)
    if not len(labels):
        return taken
    number = number_patients(patients)
    votes = np.zeros((number.max() + 1, labels.max() + 1), np.int64)
    np.add.at(votes, (number, labels), 1)
    own, sizes = votes.argmax(1), votes.sum(1)
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
