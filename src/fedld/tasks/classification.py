"""Classification: one class per sample, cross-entropy; a prediction that is not finite is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks import scores
from fedld.tasks.base import Task
from fedld.tasks.measure import Measure
from fedld.tasks.tally import SampleTally, Tally

NONE = ""  # the predicted class where an output is not finite
PREFIX = "p_"  # of the columns of probabilities


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give a mask of the samples that are classified rightly: the only place that compares classes.

    >>> right(torch.tensor([[2.0, 0.0], [float("nan"), 0.0]]), torch.tensor([0, 0]))
    tensor([ True, False])
    """
    return (outputs.argmax(1) == targets) & outputs.isfinite().all(1)


def _loss(tally: Tally) -> float:
    """Mean cross-entropy: in float64 where the predictions are kept."""
    if isinstance(tally, SampleTally):
        return _exactly(scores.cross_entropy)(tally)
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
    value=_exactly(lambda z, y: scores.balanced_accuracy(scores.confusion(z, y))),
    exact=True,
)
AUROC = Measure(name="auroc", title="AUROC", value=_exactly(scores.auroc), exact=True)
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
    better="less",
    value=_exactly(lambda z, y: scores.calibration(z, y).ece),
    exact=True,
)


@dataclass(frozen=True)
class Classification(Task):
    """Outputs are logits (N, C), targets are class numbers (N,)."""

    name: ClassVar[str] = "classification"
    measures: ClassVar[tuple[Measure, ...]] = (
        ACCURACY,
        BALANCED_ACCURACY,
        AUROC,
        WORST_CLIENT,
        LOSS,
        ECE,
    )

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

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Give the classes."""
        return targets.astype(np.int64)

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the predicted class and the probability of every class."""
        p = torch.softmax(outputs.double(), 1).numpy()
        best = [names[int(row.argmax())] if np.isfinite(row).all() else NONE for row in p]
        columns = {PREFIX + name: [f"{value:.9g}" for value in p[:, k]] for k, name in enumerate(names)}
        return {"predicted": best} | columns
