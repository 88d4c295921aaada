"""Classification: one class per sample, cross-entropy; a prediction that is not finite is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure
from fedld.tasks.scores import MEASURES

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
