"""Sums over clients from which a linear head is solved: X'X and X'Y of the head's inputs, a one appended.

Sums are the same however the images are dealt among clients. They are added in float64, so that solutions of
different partitions agree to ten digits. X'X is symmetric: clients send its upper triangle.

Targets become rows of numbers, called codes: one-hot classes; the standardised number of a regression; of
several labels +0.5 or -0.5 each, so that the sign of a prediction is the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.local import LocalClient
from fedld.local.base import Objective, TaskObjective
from fedld.models import as_model
from fedld.models.standardise import SMALLEST, StandardisedLinear
from fedld.tasks.base import Task
from fedld.tasks.classification import UNKNOWN, Classification, Multilabel
from fedld.tasks.regression import Regression

COLUMNS = 256
"""How many columns of X'X are computed at a time."""


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

    def sum_of_squares(self, counts: Tensor, n: Tensor) -> Tensor:
        """Give the sum of the squares of all codes, from their sums and the number of samples.

        Numbers are standardised over all clients, so theirs is right if all clients' samples are counted.
        """
        if self.classes:
            return counts.sum()
        return n * len(counts) / 4 if isinstance(self.task, Multilabel) else n

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


@torch.no_grad()
def head_inputs(client: LocalClient, task: Task | None = None) -> tuple[Tensor, Tensor]:
    """Give what the head's weights are multiplied with (N, D), in float64, and the labels (N,).

    Samples of a class of which a site sends nothing by itself (`LocalClient.disclosed`) are left out. Where a
    `task` has no classes, sums are over all samples, and none is left out.
    """
    batches, head = client.embedded(), as_model(client.model).head
    features = torch.cat([features for features, _ in batches]).double()
    inputs = head.inputs(features) if isinstance(head, StandardisedLinear) else features
    labels = torch.cat([labels for _, labels in batches])
    if task is not None and not isinstance(task, Classification):
        return inputs, labels
    kept = client.disclosed(torch.bincount(labels))[labels] > 0
    if not kept.any():
        raise FedLDError(f"no class has {client.smallest_class} samples, so its sums by class stay there")
    return (inputs, labels) if kept.all() else (inputs[kept], labels[kept])


def triangle(matrix: Tensor) -> Tensor:
    """Give the upper triangle of symmetric matrices (.., D, D) as vectors (.., D (D + 1) / 2).

    >>> triangle(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).tolist()
    [1.0, 2.0, 3.0]
    """
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1])
    return matrix[..., rows, columns]


def symmetric(values: Tensor) -> Tensor:
    """Undo `triangle`.

    >>> symmetric(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [[1.0, 2.0], [2.0, 3.0]]
    """
    size = round(((8 * values.shape[-1] + 1) ** 0.5 - 1) / 2)
    rows, columns = torch.triu_indices(size, size)
    matrix = values.new_zeros(*values.shape[:-1], size, size)
    matrix[..., rows, columns] = values
    matrix[..., columns, rows] = values
    return matrix


def moment_triangle(X: Tensor) -> Tensor:
    """Compute the triangle of X'X by blocks of columns: little more than half the products of all of it."""
    matrix = X.new_zeros(X.shape[1], X.shape[1])
    for start in range(0, len(matrix), COLUMNS):
        stop = start + COLUMNS
        matrix[:stop, start:stop] = X[:, :stop].T @ X[:, start:stop]
    return triangle(matrix)


def client_sums(
    client: LocalClient,
    codes: Codes = CLASS_CODES,
    *,
    by_class: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Tree:
    """Sum over a client's images: `moments` is the triangle of X'X, one per class if asked, `targets` X'Y."""
    inputs, labels = head_inputs(client, codes.task)
    X = F.pad(inputs, (0, 1), value=1.0)
    Y = codes.of(labels, as_model(client.model).head.out_features).to(X)
    if by_class:
        moments = torch.stack([moment_triangle(X[labels == c]) for c in range(Y.shape[1])])
    else:
        moments = moment_triangle(X)
    return {"moments": moments.to(dtype), "targets": (X.T @ Y).to(dtype)}


def added(earlier: Tree, messages: Sequence[Tree]) -> Tree:
    """Add clients' sums to earlier ones; a message without sums adds nothing."""
    parts = [message for message in (earlier, *messages) if "moments" in message]
    return {key: sum_of([part[key].double() for part in parts]) for key in ("moments", "targets") if parts}


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors of one shape."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    """What the sums say of standardised inputs z = scale (x - mean), weighted by class where asked.

    n        sum of the weights of all images
    counts   the same by class, or the sums of other codes (C,)
    scatter  sum of z z' (D, D)
    targets  sum of z by class (D, C)
    weights  of an image of each class (C,)
    """

    n: Tensor
    counts: Tensor
    scatter: Tensor
    targets: Tensor
    mean: Tensor
    scale: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sums: Tree, *, balanced: bool = False) -> Self:
        """Read the sums; with `balanced` every class that has images weighs alike."""
        images, count = sums["targets"][-1], sums["moments"][..., -1].sum()
        if count < len(images):
            raise FedLDError(
                f"a head for {len(images)} classes needs at least as many training images, "
                f"the clients that took part have {int(count)}"
            )
        weights = torch.ones_like(images)
        if balanced:
            present = images > 0
            weights = torch.where(present, images.sum() / (present.sum() * images.clamp(min=1)), 0.0)
        moments, targets = sums["moments"], sums["targets"] * weights
        A = symmetric(torch.tensordot(weights, moments, dims=1) if moments.ndim == 2 else moments)
        n, mean = A[-1, -1], A[:-1, -1] / A[-1, -1]
        centred = A[:-1, :-1] - n * torch.outer(mean, mean)
        scale = 1 / ((centred.diagonal() / n).clamp_min(0).sqrt() + SMALLEST)
        return cls(
            n=n,
            counts=targets[-1],
            scatter=scale[:, None] * centred * scale,
            targets=scale[:, None] * (targets[:-1] - torch.outer(mean, targets[-1])),
            mean=mean,
            scale=scale,
            weights=weights,
        )

    def head(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Turn weight (D, C) and bias (C,) for z into those for x, weight (C, D)."""
        plain = self.scale[:, None] * weight
        return plain.T, bias - self.mean @ plain


def set_head(vector: Tensor, layout: Layout, names: Sequence[str], weight: Tensor, bias: Tensor) -> Tensor:
    """Give a copy of a model's vector with another head; `names` are those of its weight and bias."""
    vector = vector.clone()
    views = layout.views(vector)
    for name, value in zip(names, (weight, bias), strict=True):
        views[name].copy_(value)
    return vector


def head_of(layout: Layout) -> list[str]:
    """Give the names of the head's weight and bias where nothing else is trained."""
    return [name for name, _ in layout.tensors]
