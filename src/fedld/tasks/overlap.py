"""How far two masks agree: Dice, intersection over union, 95 % Hausdorff distance; of every case and class.

A class that is in neither mask of a case agrees: Dice and IoU 1, distance 0. A class that is in one of them
only has Dice and IoU 0 and the diagonal of the picture as its distance, so every mean is over all cases.
"""

import math

import numpy as np
import scipy  # loads scipy.ndimage on first use: half a second that most runs never need
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Masks = NDArray[np.generic]
PERCENT = 95


def overlap(predicted: Masks, truth: Masks, classes: int) -> tuple[Floats, Floats]:
    """Give Dice and intersection over union (N, classes - 1) of masks (N, H, W), without the class 0.

    >>> [values.tolist() for values in overlap(np.array([[[1, 1]]]), np.array([[[0, 1]]]), 2)]
    [[[0.6666666666666666]], [[0.5]]]
    """
    dice = np.empty((len(truth), classes - 1))
    iou = np.empty_like(dice)
    for k in range(1, classes):
        p, t = predicted == k, truth == k
        both = (p & t).sum(axis=(1, 2))
        total = p.sum(axis=(1, 2)) + t.sum(axis=(1, 2))
        one = np.ones(len(truth))
        dice[:, k - 1] = np.divide(2 * both, total, out=one.copy(), where=total > 0)
        iou[:, k - 1] = np.divide(both, total - both, out=one, where=total > 0)
    failed = (predicted < 0).any(axis=(1, 2))  # type: ignore[operator]
    dice[failed], iou[failed] = 0.0, 0.0
    return dice, iou


def hausdorff(predicted: Masks, truth: Masks, classes: int) -> Floats:
    """Give the 95 % Hausdorff distance in pixels, (N, classes - 1), of masks (N, H, W), without the class 0.

    >>> hausdorff(np.array([[[1, 0, 0]]]), np.array([[[0, 0, 1]]]), 2)
    array([[2.]])
    """
    found = np.empty((len(truth), classes - 1))
    for row, (p, t) in enumerate(zip(predicted, truth, strict=True)):
        for k in range(1, classes):
            found[row, k - 1] = _distance(p == k, t == k)
        if (p < 0).any():
            found[row] = math.hypot(*truth.shape[1:])
    return found


def _distance(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """The larger of the 95th percentiles of the distances from either border to the other one."""
    if not a.any() and not b.any():
        return 0.0
    if not a.any() or not b.any():
        return math.hypot(*a.shape)
    border_a, border_b = _border(a), _border(b)
    to_b = scipy.ndimage.distance_transform_edt(~border_b)[border_a]
    to_a = scipy.ndimage.distance_transform_edt(~border_a)[border_b]
    return float(max(np.percentile(to_b, PERCENT), np.percentile(to_a, PERCENT)))


def _border(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The pixels of a mask that touch a pixel outside it, or the edge of the picture."""
    inside: NDArray[np.bool_] = scipy.ndimage.binary_erosion(mask)
    return mask & ~inside
