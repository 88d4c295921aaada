"""What an objective is: a value that gives the mean loss of a batch in its context.

`objective(logits, labels)` is all that most need. One that needs more (class counts, features, the incoming
model's logits, the round) is a `ContextObjective`; a context computes each part when it is asked for. A
plain function becomes an objective through `as_objective`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.errors import FedLDError
from fedld.layout import FlatModel
from fedld.models import Model, as_model
from fedld.registry import name_of
from fedld.tasks import Task
from fedld.tasks.segmentation import Segmentation


@dataclass(frozen=True, kw_only=True)
class Context:
    """A batch, the network that sees it, and what the client knows beside it.

    Only what a loss uses is computed: logits take one forward pass, features come from the same pass if they
    are used first, the teacher takes one more pass without gradients.

    Attributes:
        flat: the network as one vector.
        images: the batch's samples.
        labels: their labels.
        client_labels: labels of all training samples of the client.
        incoming: the weights that the client received.
        round: number of the round.
        weights: other weights than the network's; see `seen_by`.
        class_weights: factors of the losses by class (C,), where classes do not weigh alike.
    """

    flat: FlatModel
    images: Tensor
    labels: Tensor
    client_labels: Tensor
    incoming: Tensor
    round: int
    weights: Tensor | None = None  # other weights than the network's own; see `seen_by`
    class_weights: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The network in training."""
        return self.flat.model

    @cached_property
    def logits(self) -> Tensor:
        """Logits (N, C), in float32 or better also where the network computes in bfloat16."""
        with self._network():
            if "features" in vars(self):
                return _widened(as_model(self.model).head(self.features))
            return _widened(self.flat.model(self.images))

    @cached_property
    def features(self) -> Tensor:
        """Features (N, F), the input of the head; refused for a network that has no such parts."""
        with self._network():
            return _widened(as_model(self.model).embed(self.images))

    @cached_property
    def class_counts(self) -> Tensor:
        """How many training samples of every class the client has, (C,)."""
        counts = torch.bincount(self.client_labels, minlength=self.logits.shape[1])
        return counts.to(self.logits.device, self.logits.dtype)

    @cached_property
    def teacher(self) -> "Context":
        """The batch as the incoming model sees it: `teacher.logits`, `teacher.features`."""
        return self.seen_by(self.incoming)

    def seen_by(self, weights: Tensor) -> "Context":
        """View the batch through a model with other weights, in eval mode and without gradients.

        Args:
            weights: a model as one vector.

        Returns:
            The context of that model.
        """
        return replace(self, weights=weights)

    def with_logits(self, logits: Tensor) -> "Context":
        """Replace the logits by some that were computed in another way.

        Args:
            logits: (N, C) logits.

        Returns:
            The same batch with these logits.
        """
        other = copy(self)
        vars(other)["logits"] = _widened(logits)
        return other

    @contextmanager
    def _network(self) -> Iterator[None]:
        """Use the network itself, or for a moment the frozen one with other weights."""
        if self.weights is None:
            yield
            return
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self.flat.holding(self.weights):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
        """Refuse: logits and labels alone do not tell the loss."""
        raise FedLDError(f"objective {type(self).__name__} needs the client's context, not only its logits")


@dataclass(frozen=True)
class FunctionObjective(Objective):
    """A user's function as an objective: of (logits, labels), or of (logits, labels, context)."""

    function: Callable[..., Tensor]

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Call the function of logits and labels."""
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
        """Call the function with as many arguments as it takes."""
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
        """Compute the mean loss of a batch."""
        return self.task.objective(logits, labels)


@dataclass(frozen=True)
class PixelObjective(Objective):
    """The loss of a segmentation with an objective of classes, such as margin control, on every pixel."""

    task: Segmentation
    by_pixel: Objective

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch."""
        return self.task.objective_by(self.by_pixel, logits, labels)


def as_objective(value: Any) -> Objective:
    """Give an objective as it is; a function of (logits, labels) or (logits, labels, context) made into one.

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
    """Say how many arguments a function must be given; 2 where it does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in places and p.default is p.empty for p in parameters)
