"""What a client minimises: cross-entropy and the margin-control family (Eq. 3 of the paper, Sec. 2.3).

For more than two classes penalties use |f|^2, the squared norm of a sample's logits, and the margin is
f_y - logsumexp(f_others), which for two classes is y*f, the margin of Puli et al. 2023.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.local.base import Context, ContextObjective, Objective, as_objective
from fedld.registry import Registry


@dataclass(frozen=True)
class LogitAdjusted(ContextObjective):
    """CE of f + tau log n, n the client's class counts (Menon et al. 2021).

    With tau = 1 it is the balanced softmax (Ren et al. 2020): the prior of the client is explained by its
    counts, so the logits need not learn it. A class that the client lacks has no part in the softmax.
    """

    tau: float = 1.0

    def loss(self, context: Context) -> Tensor:
        """Compute CE of the adjusted logits."""
        return F.cross_entropy(context.logits + context.class_counts.pow(self.tau).log(), context.labels)


@dataclass(frozen=True)
class LogitCalibrated(ContextObjective):
    """CE of f - tau n^(-1/4): pairwise margins, larger for rare classes (FedLC, Zhang et al. 2022)."""

    tau: float = 1.0

    def loss(self, context: Context) -> Tensor:
        """Compute CE of the calibrated logits; a class without samples gets 100 tau, which leaves it out."""
        margins = context.class_counts.clamp(min=1e-8).pow(-0.25)
        return F.cross_entropy(context.logits - self.tau * margins, context.labels)


@dataclass(frozen=True)
class RestrictedSoftmax(ContextObjective):
    """CE with the logits of classes that the client lacks multiplied by alpha (FedRS, Li and Zhan 2021).

    Their weight vectors are then pushed away less.
    """

    alpha: float = 0.5

    def loss(self, context: Context) -> Tensor:
        """Compute CE of the restricted logits."""
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
        """Compute CE plus what the client forgets about the other classes."""
        student, teacher = (
            (not_true(logits, context.labels) / self.tau).log_softmax(1)
            for logits in (context.logits, context.teacher.logits)
        )
        forgotten = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return F.cross_entropy(context.logits, context.labels) + self.beta * self.tau**2 * forgotten


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Give the logits (N, C - 1) of all classes but the label.

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
        """Compute CE plus the squared correlations of the batch's features."""
        features = context.features
        value, n = F.cross_entropy(context.logits, context.labels), len(features)
        return value if n == 1 else value + self.beta * (n - 1) ** 2 / n * correlation(features)


def correlation(features: Tensor) -> Tensor:
    """Compute the mean squared correlation of two different features over the samples.

    a constant feature has none.

    >>> correlation(torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])).item()
    1.0
    """
    centred = features - features.mean(0)
    z = centred / (1e-8 + centred.square().sum(0) / (len(features) - 1)).sqrt()
    r = z.T @ z / (len(features) - 1)
    return r.square().fill_diagonal_(0).sum() / max(r.numel() - len(r), 1)


@dataclass(frozen=True)
class MarginLog(Objective):
    """Eq. 3: CE + lam * log(1 + |f|^2), per sample."""

    lam: float = 0.1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute CE plus the logarithmic penalty."""
        return F.cross_entropy(logits, labels) + self.lam * torch.log1p(logits.square().sum(1)).mean()


@dataclass(frozen=True)
class Official(Objective):
    """The released code's term: softmax probabilities and one norm over the whole batch.

    It depends on the batch size and moves by at most 0.067 (lam 0.1, batch 50, two classes): a comparison.
    """

    lam: float = 0.1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute CE plus the penalty on the batch of probabilities."""
        return F.cross_entropy(logits, labels) + self.lam * torch.log1p(logits.softmax(1).square().sum())


@dataclass(frozen=True)
class SpectralDecoupling(Objective):
    """CE + lam * |f|^2 (Pezeshki et al. 2021)."""

    lam: float = 0.01

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute CE plus the squared logits."""
        return F.cross_entropy(logits, labels) + self.lam * logits.square().sum(1).mean()


@dataclass(frozen=True)
class Threshold(Objective):
    """CE + lam * max(0, |f|^2 - margin^2): logits are free up to a set margin."""

    lam: float = 0.01
    margin: float = 2.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute CE plus what exceeds the margin."""
        excess = F.relu(logits.square().sum(1) - self.margin**2)
        return F.cross_entropy(logits, labels) + self.lam * excess.mean()


@dataclass(frozen=True)
class SigmaDamp(Objective):
    """log(1 + exp(-T * k*m * (1 - sigmoid(k*m)))): the gain of a large margin m is damped to nothing."""

    temperature: float = 2.0
    scale: float = 1.278

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of the damped margins."""
        m = self.scale * margin(logits, labels)
        return F.softplus(-self.temperature * m * torch.sigmoid(-m)).mean()


@dataclass(frozen=True)
class SigmaStitch(Objective):
    """log(1 + exp(-T * s(m))) with s(m) = m below 1 and 2 - m above: margins over 1 cost again."""

    temperature: float = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of the folded margins."""
        m = margin(logits, labels)
        return F.softplus(-self.temperature * torch.where(m < 1, m, 2 - m)).mean()


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute f_y - logsumexp(f_others) of every sample.

    >>> margin(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))
    tensor([2.])
    """
    is_label = F.one_hot(labels, logits.shape[1]).bool()
    others = logits.masked_fill(is_label, -torch.inf)
    return logits[is_label] - torch.logsumexp(others, 1)


OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    {
        "cross-entropy": Objective(),
        "marg-log": MarginLog(),
        "official": Official(),
        "spectral-decoupling": SpectralDecoupling(),
        "threshold": Threshold(),
        "sigma-damp": SigmaDamp(),
        "sigma-stitch": SigmaStitch(),
        "logit-adjusted": LogitAdjusted(),
        "logit-calibrated": LogitCalibrated(),
        "restricted-softmax": RestrictedSoftmax(),
        "not-true-distilled": NotTrueDistilled(),
        "decorrelated": Decorrelated(),
    },
    accept=as_objective,
)
OBJECTIVES.load_plugins()
