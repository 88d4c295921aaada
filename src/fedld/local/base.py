"""What an objective is: a value that gives the mean loss of a batch.

`objective(logits, labels)` is all that most need. One that needs more (class counts, features, the incoming
model's logits, the round) is a `ContextObjective`. A plain function becomes one through `as_objective`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedld.errors import FedLDError
from fedld.local.context import Context
from fedld.models import Model
from fedld.registry import name_of
from fedld.tasks import Task
from fedld.tasks.segmentation import Segmentation


@dataclass(frozen=True)
class Objective:
    """Base of objectives: the mean cross-entropy of a batch, unless a subclass overrides it.

    >>> import torch
    >>> class Confident(Objective):
    ...     def __call__(self, logits, labels):
    ...         return super().__call__(logits, labels) + 0.01 * logits.square().mean()
    >>> Confident()(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])).item() == Objective()(
    ...     torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])).item()
    True
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch.

        Args:
            logits: (N, C) outputs of the network.
            labels: (N,) classes.

        Returns:
            The mean over the samples.
        """
        return F.cross_entropy(logits, labels)

    def loss(self, context: Context) -> Tensor:
        """Compute the loss of a batch in its context.

        Args:
            context: the batch; most objectives need only its logits and labels.

        Returns:
            The mean over the samples.
        """
        if context.class_weights is None:
            return self(context.logits, context.labels)
        losses = F.cross_entropy(context.logits, context.labels, reduction="none")
        return (context.class_weights[context.labels] * losses).mean()


@dataclass(frozen=True)
class ContextObjective(Objective):
    """Base of objectives that need more than logits and labels; a subclass overrides `loss`.

    An objective that uses features asks for them before the logits, so that both come from one forward pass.

    >>> class Anchored(ContextObjective):
    ...     def loss(self, context):
    ...         distance = (context.features - context.teacher.features).square().mean()
    ...         return F.cross_entropy(context.logits, context.labels) + 0.1 * distance
    >>> Anchored()
    Anchored()
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Refused: logits and labels alone do not tell the loss."""
        raise FedLDError(f"objective {type(self).__name__} needs the client's context, not only its logits")


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """A user's function as an objective: of (logits, labels), or of (logits, labels, context)."""

    function: Callable[..., Tensor]

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The function of logits and labels."""
        return self.function(logits, labels)

    def check(self, logits: Tensor, labels: Tensor) -> None:
        """Refuse a function of logits and labels that gives no number to descend."""
        if _positional(self.function) != 2:
            return  # its context exists only in training
        name = name_of(self.function)
        try:
            loss: Any = self.function(logits, labels)
        except Exception as error:  # whatever the user's function raises
            raise FedLDError(f"objective '{name}' failed: {type(error).__name__}: {error}") from error
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise FedLDError(f"objective '{name}' must give one number that depends on the logits")

    def loss(self, context: Context) -> Tensor:
        """The function with as many arguments as it takes."""
        if _positional(self.function) == 2:
            return self(context.logits, context.labels)
        if isinstance(context.model, Model):
            _ = context.features  # asked for first, so that they and the logits come from one pass
        return self.function(context.logits, context.labels, context)


@dataclass(frozen=True)
class TaskObjective(Objective):
    """The plain loss of a task: what clients minimise where a sample has no class."""

    task: Task

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return self.task.objective(logits, labels)


@dataclass(frozen=True)
class PixelObjective(Objective):
    """The loss of a segmentation with an objective of classes, such as margin control, on every pixel."""

    task: Segmentation
    by_pixel: Objective

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return self.task.objective_by(self.by_pixel, logits, labels)


def as_objective(value: Any) -> Objective:
    """An objective as it is; a function of (logits, labels) or (logits, labels, context) made into one.

    >>> import torch
    >>> as_objective(lambda logits, labels: logits.square().mean())(torch.ones(2, 2), torch.zeros(2))
    tensor(1.)
    """
    if isinstance(value, Objective):
        return value
    if not callable(value) or _positional(value) not in (2, 3):
        raise FedLDError(f"an objective takes (logits, labels) or (logits, labels, context), not {value!r}")
    return FunctionObjective(value)


def _positional(function: Callable[..., Any]) -> int:
    """How many arguments a function must be given; 2 where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters)
