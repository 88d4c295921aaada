"""Segmentation: a class for every pixel; pixel cross-entropy plus soft Dice, a mean over samples.

With p the softmax of the outputs of sample i at pixels q, t the one-hot mask, and k over the classes but
the first (the background), the loss of the sample is

    l_i = mean_q -log p_iq,t(q)  +  1 - mean_k (2 sum_q p_iqk t_iqk + 1) / (sum_q p_iqk + sum_q t_iqk + 1)

Both terms are of one sample alone, so the loss of a client is a mean over its samples and Eq. 2 of the
paper holds exactly. The 1 in the fraction is one pixel: a class that is absent and not predicted costs
nothing.

How far two masks agree is measured of every case and class: Dice, intersection over union, 95 % Hausdorff
distance. A class that is in neither mask of a case agrees: Dice and IoU 1, distance 0. A class that is in
one of them only has Dice and IoU 0 and the diagonal of the picture as its distance, so every mean is over
all cases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import scipy  # loads scipy.ndimage on first use: half a second that most runs never need
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure, SamplePredictions, SampleTally, Scores, Tally

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
        ones = np.ones(len(truth))
        dice[:, k - 1] = np.divide(2 * both, total, out=ones.copy(), where=total > 0)
        iou[:, k - 1] = np.divide(both, total - both, out=ones, where=total > 0)
    failed = (predicted < 0).any(axis=(1, 2))  # type: ignore[operator]
    dice[failed], iou[failed] = 0.0, 0.0
    return dice, iou


def hausdorff(predicted: Masks, truth: Masks, classes: int) -> Floats:
    """Give the 95 % Hausdorff distance in pixels, (N, classes - 1), of masks (N, H, W), without the class 0.

    >>> hausdorff(np.array([[[1, 0, 0]]]), np.array([[[0, 0, 1]]]), 2)
    array([[2.]])
    """
    distances = np.empty((len(truth), classes - 1))
    for row, (p, t) in enumerate(zip(predicted, truth, strict=True)):
        for k in range(1, classes):
            distances[row, k - 1] = _distance(p == k, t == k)
        if (p < 0).any():
            distances[row] = math.hypot(*truth.shape[1:])
    return distances


def _distance(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    """Give the larger of the 95th percentiles of the distances from either border to the other one."""
    if not a.any() and not b.any():
        return 0.0
    if not a.any() or not b.any():
        return math.hypot(*a.shape)
    border_a, border_b = _border(a), _border(b)
    to_b = scipy.ndimage.distance_transform_edt(~border_b)[border_a]
    to_a = scipy.ndimage.distance_transform_edt(~border_a)[border_b]
    return float(max(np.percentile(to_b, PERCENT), np.percentile(to_a, PERCENT)))


def _border(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Give the pixels of a mask that touch a pixel outside it, or the edge of the picture."""
    inside: NDArray[np.bool_] = scipy.ndimage.binary_erosion(mask)
    return mask & ~inside


SMOOTH = 1.0  # pixels
CHUNK = 64  # samples at once, because losses are in float64
KINDS = {"dice": "Dice", "iou": "IoU", "hausdorff": "95 % Hausdorff distance"}


def _share(name: str) -> Callable[[Tally], float]:
    return lambda tally: tally.share(name) if name in tally.sums else float("nan")


def _measure(kind: str, suffix: str = "", of: str = "") -> Measure:
    """Describe the mean over cases of one kind, over all classes or of one."""
    name = kind + suffix
    title = KINDS[kind] + of
    if kind == "hausdorff":
        return Measure(
            name=name,
            title=title,
            unit="px",
            digits=2,
            better="less",
            value=_share(name),
            minor=bool(suffix),
        )
    return Measure(name=name, title=title, value=_share(name), minor=bool(suffix))


DICE, IOU, HAUSDORFF = (_measure(kind) for kind in KINDS)
WORST_CLIENT = Measure(name="worst_client", title="worst client's Dice", worst="dice")
LOSS = Measure(name="loss", title="loss", better="less", value=lambda tally: tally.mean)
MEASURES = (DICE, IOU, HAUSDORFF, WORST_CLIENT, LOSS)


@dataclass(frozen=True)
class Segmentation(Task):
    """Outputs (N, C, H, W) are logits of every pixel, targets (N, H, W) are class numbers."""

    name: ClassVar[str] = "segmentation"
    lacks: ClassVar[str] = "gives a mask to a sample, not one class"
    dense: ClassVar[bool] = True
    classes: tuple[str, ...] = ()

    @property
    def measures(self) -> tuple[Measure, ...]:  # type: ignore[override]
        """Means over all classes but the first; then those of every class, where there are several."""
        names = self.classes[1:]
        if len(names) < 2:
            return MEASURES
        single = [_measure(kind, f"_{k}", f" of {name}") for k, name in enumerate(names, 1) for kind in KINDS]
        return (*MEASURES, *single)

    def fitted(self, clients: Sequence[Mapping[str, float]], names: Sequence[str]) -> "Segmentation":
        """Give the task with measures of each of these classes."""
        return replace(self, classes=tuple(names))

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of a batch."""
        return self.objective_by(F.cross_entropy, outputs, targets)

    def objective_by(
        self, by_point: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Give the mean loss of a batch with another loss of pixels in the place of cross-entropy.

        Args:
            by_point: mean loss of logits (M, C) and classes (M,), such as margin control.
            outputs: logits (N, C, H, W).
            targets: masks (N, H, W).
        """
        pixels = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
        return by_point(pixels, targets.reshape(-1).long()) + soft_dice(outputs, targets).mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the loss of every sample; nan where a logit is not finite.

        >>> Segmentation().losses(torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 1))
        tensor([1.0265], dtype=torch.float64)
        """
        parts = []
        for z, y in zip(torch.split(outputs, CHUNK), torch.split(targets, CHUNK), strict=True):
            wide = z.double()
            pixels = F.cross_entropy(wide, y.long(), reduction="none").mean((1, 2))
            finite = wide.isfinite().flatten(1).all(1)
            parts.append((pixels + soft_dice(wide, y)).masked_fill(~finite, torch.nan))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give sums over cases of Dice and IoU: the mean over classes, and where there are several, each."""
        dice, iou = overlap(self.masks(outputs), np.asarray(targets), outputs.shape[1])
        return _sums("dice", dice) | _sums("iou", iou)

    def sample_tally(self, outputs: Tensor, targets: Tensor) -> SampleTally:
        """Tally a batch with its Hausdorff distances, which only test sets have; keep its predictions."""
        plain = self.tally(outputs, targets)
        distances = hausdorff(self.masks(outputs), np.asarray(targets), outputs.shape[1])
        wide: Any = outputs.detach().cpu().numpy()  # not in float64: there is one for every pixel
        kept = SamplePredictions(wide, np.asarray(targets.cpu()))
        sums = plain.sums | _sums("hausdorff", distances)
        return SampleTally(plain.count, plain.loss, plain.loss_squared, sums, predictions=kept)

    def scores(self, tally: Tally, further: Mapping[str, Measure] | None = None) -> Scores:
        """Give the values of all measures; no distances where none were computed."""
        values = super().scores(tally, further)
        absent = "hausdorff" not in tally.sums
        return {
            name: value for name, value in values.items() if not (absent and name.startswith("hausdorff"))
        }

    def masks(self, outputs: Tensor) -> NDArray[np.int64]:
        """Give the predicted class of every pixel; -1 in samples where a logit is not finite."""
        finite = outputs.isfinite().flatten(1).all(1)
        classes = outputs.argmax(1).masked_fill(~finite[:, None, None], -1)
        return np.asarray(classes.cpu())

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the numbers of pixels that are predicted to be of each class but the first."""
        masks = self.masks(outputs)
        return {f"predicted_{name}": _areas(masks, k) for k, name in enumerate(names) if k}

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give the numbers of pixels that are of each class but the first."""
        return {f"pixels_{name}": _areas(targets, k) for k, name in enumerate(names) if k}

    def case_values(
        self, outputs: Tensor, targets: NDArray[np.generic], names: Sequence[str]
    ) -> dict[str, NDArray[np.float64]]:
        """Give Dice, IoU and Hausdorff distance of every case: the means over classes, and each class's."""
        masks, truth, count = self.masks(outputs), np.asarray(targets), outputs.shape[1]
        by_class = dict(zip(("dice", "iou"), overlap(masks, truth, count), strict=True))
        by_class["hausdorff"] = hausdorff(masks, truth, count)
        columns = {kind: values.mean(1) for kind, values in by_class.items()}
        if count > 2:
            for kind, values in by_class.items():
                columns |= {f"{kind}_{name}": values[:, k] for k, name in enumerate(names[1:])}
        return columns

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Give 1 for samples with any class but the first, else 0."""
        marked = np.asarray(targets, np.int64).any(axis=(1, 2))
        return np.asarray(marked, np.int64)

    def strata_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of these groups."""
        return ("nothing marked", "marked")

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give logits and masks to try functions on."""
        masks = torch.arange(2 * 8 * 8).reshape(2, 8, 8) % outputs
        return F.one_hot(masks.roll(1, 2), outputs).movedim(-1, 1).float(), masks


def soft_dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give 1 - soft Dice of every sample: the mean over all classes but the first.

    >>> soft_dice(torch.zeros(1, 2, 1, 2), torch.tensor([[[0, 1]]]))
    tensor([0.3333])
    """
    p = outputs.softmax(1)[:, 1:]
    t = F.one_hot(targets.long(), outputs.shape[1]).movedim(-1, 1)[:, 1:].to(p.dtype)
    both = (p * t).sum((2, 3))
    total = p.sum((2, 3)) + t.sum((2, 3))
    return 1 - ((2 * both + SMOOTH) / (total + SMOOTH)).mean(1)


def _sums(kind: str, values: NDArray[np.float64]) -> dict[str, float]:
    """Sum over cases of the mean over classes; and of every class, where there are several."""
    totals = {kind: float(values.mean(1).sum())}
    if values.shape[1] > 1:
        totals |= {f"{kind}_{k}": float(column.sum()) for k, column in enumerate(values.T, 1)}
    return totals


def _areas(masks: NDArray[np.generic], k: int) -> list[str]:
    return [str(int(area)) for area in (np.asarray(masks) == k).sum(axis=(1, 2))]
