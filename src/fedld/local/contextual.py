"""Objectives that need their context: the client's class counts, the incoming model, or the features.

Most answer one trouble of label skew: a client that has few samples of a class, or none, learns to deny it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.local.base import ContextObjective
from fedld.local.context import Context


@dataclass(frozen=True)
class LogitAdjusted(ContextObjective):
    """CE of f + tau log n, n the client's class counts (Menon et al. 2021).

    With tau = 1 it is the balanced softmax (Ren et al. 2020): the prior of the client is explained by its
    counts, so the logits need not learn it. A class that the client lacks has no part in the softmax.
    """

    tau: float = 1.0

    def loss(self, context: Context) -> Tensor:
        """CE of the adjusted logits."""
        return F.cross_entropy(context.logits + context.class_counts.pow(self.tau).log(), context.labels)


@dataclass(frozen=True)
class LogitCalibrated(ContextObjective):
    """CE of f - tau n^(-1/4): pairwise margins, larger for rare classes (FedLC, Zhang et al. 2022)."""

    tau: float = 1.0

    def loss(self, context: Context) -> Tensor:
        """CE of the calibrated logits; a class without samples gets 100 tau, which leaves it out."""
        margins = context.class_counts.clamp(min=1e-8).pow(-0.25)
        return F.cross_entropy(context.logits - self.tau * margins, context.labels)


@dataclass(frozen=True)
class RestrictedSoftmax(ContextObjective):
    """CE with the logits of classes that the client lacks multiplied by alpha (FedRS, Li and Zhan 2021).

    Their weight vectors are then pushed away less.
    """

    alpha: float = 0.5

    def loss(self, context: Context) -> Tensor:
        """CE of the restricted logits."""
        counts = context.class_counts
        scale = torch.ones_like(counts).masked_fill(counts == 0, self.alpha)
        return F.cross_entropy(context.logits * scale, context.labels)


@dataclass(frozen=True)
class NotTrueDistilled(ContextObjective):
    """CE + beta tau^2 KL(teacher | student) over all classes but the true one (FedNTD, Lee et al. 2022).

    The teacher is the incoming model. With two classes a single one is left, and the term is zero.
    """

    beta: float = 1.0
    tau: float = 1.0

    def loss(self, context: Context) -> Tensor:
        """CE plus what the client forgets about the other classes."""
        student, teacher = (
            (not_true(logits, context.labels) / self.tau).log_softmax(1)
            for logits in (context.logits, context.teacher.logits)
        )
        forgotten = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return F.cross_entropy(context.logits, context.labels) + self.beta * self.tau**2 * forgotten


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits (N, C - 1) of all classes but the label.

    >>> not_true(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1]))
    tensor([[1., 3.]])
    """
    others = ~F.one_hot(labels, logits.shape[1]).bool()
    return logits[others].view(len(logits), -1)


@dataclass(frozen=True)
class Decorrelated(ContextObjective):
    """CE + beta (N - 1)^2 / N mean_{a != b} r_ab^2, r the features' correlation (FedDecorr, Shi et al. 2023).

    The factor, about the size N of the batch, is the released code's, with which beta was chosen; the paper
    has none.
    """

    beta: float = 0.1

    def loss(self, context: Context) -> Tensor:
        """CE plus the squared correlations of the batch's features."""
        features = context.features
        value, n = F.cross_entropy(context.logits, context.labels), len(features)
        return value if n == 1 else value + self.beta * (n - 1) ** 2 / n * correlation(features)


def correlation(features: Tensor) -> Tensor:
    """Mean squared correlation of two different features over the samples; a constant feature has none.

    >>> correlation(torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])).item()
    1.0
    """
    centred = features - features.mean(0)
    z = centred / (1e-8 + centred.square().sum(0) / (len(features) - 1)).sqrt()
    r = z.T @ z / (len(features) - 1)
    return r.square().fill_diagonal_(0).sum() / max(r.numel() - len(r), 1)
