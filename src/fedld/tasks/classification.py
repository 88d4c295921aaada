"""Classification: one class per sample, or several labels that are each present or absent.

One class: cross-entropy; a prediction that is not finite is wrong. Several labels: sigmoid cross-entropy,
unknown labels masked out. The loss of a sample is the sum over its known labels divided by the number of
labels, so that every known label counts the same and the mean over samples decomposes like any other (Eq. 2
of the paper).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure, SampleTally, Tally
from fedld.tasks.scores import MEASURES, area

NONE = ""  # the predicted class where an output is not finite
PREFIX = "p_"  # of the columns of probabilities


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give a mask of the samples that are classified rightly: the only place that compares classes.

    >>> right(torch.tensor([[2.0, 0.0], [float("nan"), 0.0]]), torch.tensor([0, 0]))
    tensor([ True, False])
    """
    return (outputs.argmax(1) == targets) & outputs.isfinite().all(1)


@dataclass(frozen=True)
class Classification(Task):
    """Outputs are logits (N, C), targets are class numbers (N,)."""

    name: ClassVar[str] = "classification"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the cross-entropy of every sample; nan where a logit is not finite.

        >>> Classification().losses(torch.zeros(1, 2), torch.tensor([1]))
        tensor([0.6931], dtype=torch.float64)
        """
        losses = F.cross_entropy(outputs, targets, reduction="none").double()
        return losses.masked_fill(~outputs.isfinite().all(1), torch.nan)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give the number of right answers; per-class counts of few samples would tell of single ones."""
        return {"correct": int(right(outputs, targets).sum())}

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean cross-entropy of a batch."""
        return F.cross_entropy(outputs, targets)

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Give the classes."""
        return targets.astype(np.int64)

    def strata_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of the classes."""
        return tuple(names)

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give the names of the true classes."""
        return {"label": [names[int(k)] for k in targets]}

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give logits that are neither all equal nor all right, and labels of every class."""
        labels = torch.arange(2 * outputs) % outputs
        return torch.eye(outputs).roll(1, 0).repeat(2, 1), labels

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the predicted class and the probability of every class."""
        p = torch.softmax(outputs.double(), 1).numpy()
        best = [names[int(row.argmax())] if np.isfinite(row).all() else NONE for row in p]
        columns = {PREFIX + name: [f"{value:.9g}" for value in p[:, k]] for k, name in enumerate(names)}
        return {"predicted": best} | columns


Floats = NDArray[np.float64]
UNKNOWN = -1


def label_auroc(scores: Floats, targets: Floats) -> float:
    """Give the area under the ROC curve of one label over the samples that know it.

    >>> label_auroc(np.array([0.1, 0.9, 0.5]), np.array([0.0, 1.0, -1.0]))
    1.0
    """
    labelled = targets != UNKNOWN
    positive = targets[labelled] == 1
    if not positive.any() or positive.all() or not np.isfinite(scores[labelled]).all():
        return float("nan")
    return area(scores[labelled], positive)


def average_precision(scores: Floats, targets: Floats) -> float:
    """Give the average precision of one label: precision at every positive's score, averaged over positives.

    >>> average_precision(np.array([0.9, 0.8, 0.1]), np.array([1.0, 0.0, 1.0]))
    0.8333333333333333
    """
    labelled = targets != UNKNOWN
    z, positive = scores[labelled], targets[labelled] == 1
    if not positive.any() or positive.all() or not np.isfinite(z).all():
        return float("nan")
    order = np.argsort(-z, kind="stable")
    last = np.searchsorted(-z[order], -z[order], side="right")  # equal scores are one threshold
    hits = np.cumsum(positive[order])[last - 1]
    return float((hits / last)[positive[order]].mean())


@dataclass(frozen=True)
class _OfLabels:
    """The mean of a function over the labels for which it is defined, or its value for one of them."""

    function: Callable[[Floats, Floats], float]
    which: int | None = None

    def __call__(self, tally: Tally) -> float:
        assert isinstance(tally, SampleTally)
        z, y = tally.predictions.outputs, np.asarray(tally.predictions.targets, np.float64)
        chosen = range(z.shape[1]) if self.which is None else [self.which]
        values = [self.function(z[:, k], y[:, k]) for k in chosen]
        defined = [value for value in values if not np.isnan(value)]
        return float(np.mean(defined)) if defined else float("nan")


def _accuracy(tally: Tally) -> float:
    """Give the share of known labels that are predicted rightly at probability 0.5."""
    return tally.sums["correct"] / tally.sums["known"] if tally.sums["known"] else float("nan")


def _unknown(tally: Tally) -> float:
    """Give the share of labels that are unknown."""
    return tally.sums["unknown"] / (tally.sums["known"] + tally.sums["unknown"])


MEASURES = (
    Measure(name="auroc", title="mean AUROC", value=_OfLabels(label_auroc), exact=True),
    Measure(
        name="average_precision",
        title="mean average precision",
        value=_OfLabels(average_precision),
        exact=True,
    ),
    Measure(name="accuracy", title="accuracy of labels", unit="%", scale=100, digits=2, value=_accuracy),
    Measure(
        name="worst_client",
        title="worst client's accuracy of labels",
        unit="%",
        scale=100,
        digits=2,
        worst="accuracy",
    ),
    Measure(name="loss", title="loss", better="less", value=lambda tally: tally.mean),
    Measure(
        name="unknown",
        title="unknown labels",
        unit="%",
        scale=100,
        digits=2,
        better="less",
        value=_unknown,
        minor=True,
    ),
)


@dataclass(frozen=True)
class Multilabel(Task):
    """Outputs (N, K) are log odds; targets (N, K) are 1, 0 or -1 where a label is unknown.

    labels: names of the labels, known once the task is fitted to a federation.
    """

    name = "multilabel"
    labels: tuple[str, ...] = ()

    @property
    def measures(self) -> tuple[Measure, ...]:  # type: ignore[override]
        """Give the means over labels, then AUROC and average precision of every label."""
        return MEASURES + tuple(
            Measure(
                name=f"{name}_{_word(label)}_{k + 1}",
                title=f"{title} of {label}",
                value=_OfLabels(function, k),
                exact=True,
                minor=True,
            )
            for name, title, function in (
                ("auroc", "AUROC", label_auroc),
                ("precision", "average precision", average_precision),
            )
            for k, label in enumerate(self.labels)
        )

    def fitted(self, clients: Sequence[Mapping[str, float]], names: Sequence[str]) -> "Multilabel":
        """Take the names of the labels."""
        return replace(self, labels=tuple(names))

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of a batch."""
        return masked_cross_entropy(outputs, targets).mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the loss of every sample; 0 where no label is known.

        >>> Multilabel().losses(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, -1.0]]))
        tensor([0.6931, 0.3466], dtype=torch.float64)
        """
        return masked_cross_entropy(outputs.double(), targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give the numbers of known, unknown and rightly predicted labels."""
        labelled = targets != UNKNOWN
        right = ((outputs > 0) == (targets == 1)) & labelled & outputs.isfinite()
        return {
            "known": int(labelled.sum()),
            "unknown": int((~labelled).sum()),
            "correct": int(right.sum()),
        }

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the probability of every label."""
        p = torch.sigmoid(outputs.double())
        return {PREFIX + name: [f"{value:.9g}" for value in p[:, k].tolist()] for k, name in enumerate(names)}

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give every label: 1, 0 or nothing where it is unknown."""
        rows = np.asarray(targets, np.float64)
        return {
            f"label_{name}": ["" if value == UNKNOWN else f"{value:g}" for value in rows[:, k]]
            for k, name in enumerate(names)
        }

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give outputs and targets to try functions on: every label is present, absent and unknown once."""
        targets = torch.tensor([1.0, 0.0, -1.0, 1.0]).repeat(outputs, 1).T.contiguous()
        return torch.zeros(4, outputs), targets


def masked_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the sum over known labels of the sigmoid cross-entropy divided by the number of labels."""
    labelled = targets != UNKNOWN
    truth = (targets == 1).to(outputs.dtype)
    losses = F.binary_cross_entropy_with_logits(outputs, truth, reduction="none")
    return torch.where(labelled, losses, 0.0).sum(1) / outputs.shape[1]


def _word(label: str) -> str:
    """Give a label's name as part of the name of a measure.

    >>> _word("Pleural effusion")
    'pleural_effusion'
    """
    return re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")[:30] or "label"
