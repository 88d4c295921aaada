"""What a client minimises: cross-entropy and the margin-control family (Eq. 3 of the paper, Sec. 2.3).

For more than two classes penalties use |f|^2, the squared norm of a sample's logits, and the margin is
f_y - logsumexp(f_others), which for two classes is y*f, the margin of Puli et al. 2023.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.local.base import Objective, as_objective
from fedld.local.contextual import (
    Decorrelated,
    LogitAdjusted,
    LogitCalibrated,
    NotTrueDistilled,
    RestrictedSoftmax,
)
from fedld.registry import plugins


@dataclass(frozen=True)
class MarginLog(Objective):
    """Eq. 3: CE + lam * log(1 + |f|^2), per sample."""

    lam: float = 0.1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CE plus the logarithmic penalty."""
        return F.cross_entropy(logits, labels) + self.lam * torch.log1p(logits.square().sum(1)).mean()


@dataclass(frozen=True)
class Official(Objective):
    """The released code's term: softmax probabilities and one norm over the whole batch.

    It depends on the batch size and moves by at most 0.067 (lam 0.1, batch 50, two classes): a comparison.
    """

    lam: float = 0.1

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CE plus the penalty on the batch of probabilities."""
        return F.cross_entropy(logits, labels) + self.lam * torch.log1p(logits.softmax(1).square().sum())


@dataclass(frozen=True)
class SpectralDecoupling(Objective):
    """CE + lam * |f|^2 (Pezeshki et al. 2021)."""

    lam: float = 0.01

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CE plus the squared logits."""
        return F.cross_entropy(logits, labels) + self.lam * logits.square().sum(1).mean()


@dataclass(frozen=True)
class Threshold(Objective):
    """CE + lam * max(0, |f|^2 - margin^2): logits are free up to a set margin."""

    lam: float = 0.01
    margin: float = 2.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CE plus what exceeds the margin."""
        excess = F.relu(logits.square().sum(1) - self.margin**2)
        return F.cross_entropy(logits, labels) + self.lam * excess.mean()


@dataclass(frozen=True)
class SigmaDamp(Objective):
    """log(1 + exp(-T * k*m * (1 - sigmoid(k*m)))): the gain of a large margin m is damped to nothing."""

    temperature: float = 2.0
    scale: float = 1.278

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of the damped margins."""
        m = self.scale * margin(logits, labels)
        return F.softplus(-self.temperature * m * torch.sigmoid(-m)).mean()


@dataclass(frozen=True)
class SigmaStitch(Objective):
    """log(1 + exp(-T * s(m))) with s(m) = m below 1 and 2 - m above: margins over 1 cost again."""

    temperature: float = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of the folded margins."""
        m = margin(logits, labels)
        return F.softplus(-self.temperature * torch.where(m < 1, m, 2 - m)).mean()


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """f_y - logsumexp(f_others) of every sample.

    >>> margin(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))
    tensor([2.])
    """
    is_label = F.one_hot(labels, logits.shape[1]).bool()
    others = logits.masked_fill(is_label, -torch.inf)
    return logits[is_label] - torch.logsumexp(others, 1)


OBJECTIVES: dict[str, Objective] = {
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
}
OBJECTIVES |= {name: as_objective(value) for name, value in plugins("objectives", callable).items()}
