"""Functions of logits and class numbers: confusion, AUROC, cross-entropy and calibration.

Written on NumPy alone (scikit-learn is the tests' reference): readers of records import this without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedld.errors import FedLDError
from fedld.tasks.measure import Measure, SampleTally, Tally

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
BINS = 15  # equal confidence bins, as in Guo et al. 2017


@dataclass(frozen=True)
class Calibration:
    """Reliability diagram: confidence and accuracy per bin (nan where empty) and the gap over all bins."""

    confidence: Floats
    accuracy: Floats
    count: Integers
    ece: float


def confusion(logits: ArrayLike, labels: ArrayLike) -> Integers:
    """Count (C, C + 1): row = true class, column = predicted class, last column = no finite prediction.

    >>> confusion([[2.0, 0.0], [0.0, 1.0], [float("nan"), 0.0]], [0, 0, 1])
    array([[1, 1, 0],
           [0, 0, 1]])
    """
    z, y = _checked(logits, labels)
    classes = z.shape[1]
    predicted = np.where(_finite(z), z.argmax(1), classes)
    flat = np.bincount(y * (classes + 1) + predicted, minlength=classes * (classes + 1))
    return flat.reshape(classes, classes + 1).astype(np.int64)


def balanced_accuracy(counts: Integers) -> float:
    """Compute the mean recall over the classes that occur."""
    totals = counts.sum(1)
    present = totals > 0
    return float(np.mean(np.diag(counts)[present] / totals[present])) if present.any() else float("nan")


def cross_entropy(logits: ArrayLike, labels: ArrayLike) -> float:
    """Compute the mean over samples of -log softmax(z)_y.

    Nan without samples or with a logit that is not finite.
    """
    z, y = _checked(logits, labels)
    if not len(y) or not _finite(z).all():
        return float("nan")
    return float(np.mean(log_sum_exp(z) - z[np.arange(len(y)), y]))


def auroc(logits: ArrayLike, labels: ArrayLike) -> float:
    """Compute the area under the ROC curve: one against the rest, mean over the classes that occur.

    Nan for one class.

    A sample's score for class k is the log odds z_k - logsumexp(z_others), which orders samples as the
    softmax does but never saturates. With two classes both sides agree and this is the usual binary AUROC.
    """
    z, y = _checked(logits, labels)
    present = np.unique(y)
    if len(present) < 2 or not _finite(z).all():
        return float("nan")
    areas = [area(z[:, k] - log_sum_exp(np.delete(z, k, axis=1)), y == k) for k in present]
    return float(np.mean(areas))


def calibration(logits: ArrayLike, labels: ArrayLike, bins: int = BINS) -> Calibration:
    """Compute the calibration error: sum of count/N |accuracy - confidence| over bins (Guo et al.

    2017, Eq. 3).
    """
    z, y = _checked(logits, labels)
    empty = np.full(bins, np.nan)
    if not len(y) or not _finite(z).all():
        return Calibration(empty, empty, np.zeros(bins, np.int64), float("nan"))
    top = np.exp(z.max(1) - log_sum_exp(z))
    index = np.clip(np.ceil(top * bins).astype(np.int64) - 1, 0, bins - 1)  # bins are open on the left
    count = np.bincount(index, minlength=bins)
    sums = [np.bincount(index, values, minlength=bins) for values in (top, (z.argmax(1) == y).astype(float))]
    confidence, accuracy = (np.divide(s, count, out=empty.copy(), where=count > 0) for s in sums)
    return Calibration(confidence, accuracy, count, float(np.abs(sums[0] - sums[1]).sum() / len(y)))


def area(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """Compute the share of (positive, negative) pairs in the right order, ties count half (Mann-Whitney)."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2
    n = int(positive.sum())
    return float((midranks[inverse][positive].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def log_sum_exp(z: Floats) -> Floats:
    """Give log(sum(exp(z))) of every row of finite numbers, bit for bit as SciPy does.

    Importing scipy.special takes a third of a second, which every worker would spend.

    >>> log_sum_exp(np.array([[0.0, 0.0], [1000.0, 0.0]])).tolist()
    [0.6931471805599453, 1000.0]
    """
    top = z.max(axis=1, keepdims=True)
    largest = z == top
    count = largest.sum(axis=1, keepdims=True, dtype=np.float64)
    rest = np.exp(np.where(largest, -np.inf, z) - top).sum(axis=1, keepdims=True) / count
    return np.asarray((np.log1p(rest) + np.log(count) + top)[:, 0])


def _finite(z: Floats) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(z).all(axis=1))


def _checked(logits: Any, labels: Any) -> tuple[Floats, Integers]:
    """Compute the logits and labels as arrays; torch tensors of any precision are converted."""
    if hasattr(logits, "detach"):
        logits = logits.detach().double().cpu()
    if hasattr(labels, "detach"):
        labels = labels.detach().cpu()
    z, y = np.asarray(logits, np.float64), np.asarray(labels).astype(np.int64)
    if z.ndim != 2 or z.shape[1] < 2 or y.shape != z.shape[:1]:
        raise FedLDError(f"logits must be (N, C >= 2) and labels (N,), got {z.shape} and {y.shape}")
    if len(y) and not 0 <= y.min() <= y.max() < z.shape[1]:
        raise FedLDError(f"labels must lie in 0..{z.shape[1] - 1}, got {y.min()}..{y.max()}")
    return z, y


def _loss(tally: Tally) -> float:
    """Compute the mean cross-entropy: in float64 where the predictions are kept."""
    if isinstance(tally, SampleTally):
        return cross_entropy(tally.predictions.outputs, tally.predictions.targets)
    return tally.mean


def _exactly(function: Callable[[Any, Any], float]) -> Callable[[Tally], float]:
    """Make a function of outputs and targets one of a tally that keeps them."""

    def value(tally: Tally) -> float:
        assert isinstance(tally, SampleTally)
        return function(tally.predictions.outputs, tally.predictions.targets)

    return value


ACCURACY = Measure(
    name="accuracy",
    title="accuracy",
    unit="%",
    scale=100,
    digits=2,
    value=lambda tally: tally.share("correct"),
)
BALANCED_ACCURACY = Measure(
    name="balanced_accuracy",
    title="balanced accuracy",
    unit="%",
    scale=100,
    digits=2,
    value=_exactly(lambda z, y: balanced_accuracy(confusion(z, y))),
    exact=True,
)
AUROC = Measure(name="auroc", title="AUROC", value=_exactly(auroc), exact=True)
WORST_CLIENT = Measure(
    name="worst_client",
    title="worst client's accuracy",
    unit="%",
    scale=100,
    digits=2,
    worst="accuracy",
)
LOSS = Measure(name="loss", title="loss", better="less", value=_loss)
ECE = Measure(
    name="ece",
    title="calibration error",
    digits=3,
    minor=True,
    better="less",
    value=_exactly(lambda z, y: calibration(z, y).ece),
    exact=True,
)
MEASURES = (ACCURACY, BALANCED_ACCURACY, AUROC, WORST_CLIENT, LOSS, ECE)
"""What a classification is judged by; the first one decides unless another is named."""
