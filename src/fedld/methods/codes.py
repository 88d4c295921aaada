"""What closed forms regress on: a row of numbers for every sample, by the task.

One-hot classes; the standardised number of a regression; of several labels +0.5 or -0.5 each, so that the
sign of a prediction is the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.errors import FedLDError
from fedld.local.base import Objective, TaskObjective
from fedld.tasks.base import Task
from fedld.tasks.classification import Classification
from fedld.tasks.multilabel import UNKNOWN, Multilabel
from fedld.tasks.regression import Regression


@dataclass(frozen=True)
class Codes:
    """Codes of targets, and what a scaled prediction of them costs.

    of      from targets (N, ...) and the number of outputs to codes (N, C)
    losses  from predictions (N, C), targets and T factors of the predictions to losses (T, N)
    scaled  whether predictions are scaled by the factor of the least loss; else they stay as they are
    task    what is learned
    """

    of: Callable[[Tensor, int], Tensor]
    losses: Callable[[Tensor, Tensor, Tensor], Tensor]
    scaled: bool
    task: Task

    @property
    def classes(self) -> bool:
        """Whether every sample has one class."""
        return isinstance(self.task, Classification)


def _class_losses(logits: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    scaled = factors[:, None, None] * (logits - logits.amax(1, keepdim=True))
    right = torch.gather(scaled, 2, labels.expand(len(scaled), -1)[..., None])[..., 0]
    return torch.logsumexp(scaled, 2) - right


CLASS_CODES = Codes(F.one_hot, _class_losses, scaled=True, task=Classification())


def codes_for(objective: Objective) -> Codes:
    """Give the codes of what clients minimise.

    Raises:
        FedLDError: the task has no codes that least squares could predict.
    """
    if not isinstance(objective, TaskObjective):
        return CLASS_CODES
    match objective.task:
        case Regression() as task:
            return Codes(_Numbers(task), _Errors(task), scaled=False, task=task)
        case Multilabel() as task:
            return Codes(_label_codes, _label_losses, scaled=True, task=task)
        case task:
            raise FedLDError(f"{task.name} has no closed form by least squares")


def _label_codes(targets: Tensor, outputs: int) -> Tensor:
    unknown = int((targets == UNKNOWN).sum())
    if unknown:
        raise FedLDError(
            f"least squares needs every label of every sample, and {unknown} labels are unknown here: "
            "take a method that trains, such as fedavg"
        )
    return targets.double() - 0.5


def _label_losses(logits: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    scaled = factors[:, None, None] * logits
    truth = targets.to(scaled).expand_as(scaled)
    return F.binary_cross_entropy_with_logits(scaled, truth, reduction="none").mean(2)


@dataclass(frozen=True)
class _Numbers:
    """Standardised targets of a regression."""

    task: Regression

    def __call__(self, targets: Tensor, outputs: int) -> Tensor:
        return ((targets.double() - self.task.mean) / self.task.deviation)[:, None]


@dataclass(frozen=True)
class _Errors:
    """Squared errors of predictions of standardised targets."""

    task: Regression

    def __call__(self, values: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
        errors = (values - _Numbers(self.task)(targets, 1)).square().sum(1)
        return errors.expand(len(factors), -1)
