"""Measures beyond the built-in ones, as sums: those of parts of a test set add up to those of the whole.

A `Metric` turns a batch's logits and labels into a vector of sums and the sums into a value, so measures of
several batches, clients or sites are merged by adding, never by averaging averages.
"""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from fedld.errors import FedLDError
from fedld.registry import Registry, name_of

BINS = 1000


@dataclass(frozen=True)
class Metric:
    """A user's measure, computed from sums so that batches, clients and sites merge by adding.

    Attributes:
        sums: function of (logits, labels) of a batch that returns a vector of sums.
        value: function of the added sums that returns the measure.
        better: whether "more" or "less" is better.
        title, unit, scale, digits: how tables have it, as in `fedld.Measure`.

    >>> hits = Metric(lambda z, y: torch.stack([(z.argmax(1) == y).sum(), torch.tensor(len(y))]),
    ...               lambda sums: sums[0] / sums[1])
    >>> hits(torch.eye(2), torch.tensor([0, 0]))
    0.5
    """

    sums: Callable[[Tensor, Tensor], Tensor]
    value: Callable[[Tensor], Tensor | float]
    _: KW_ONLY
    better: Literal["more", "less"] = "more"
    title: str = ""
    unit: str = ""
    scale: float = 1.0
    digits: int = 4

    def __call__(self, logits: Tensor, labels: Tensor) -> float:
        """Compute the measure of one batch.

        Args:
            logits: (N, C) outputs.
            labels: (N,) labels.

        Returns:
            The value.
        """
        return self.merged([self.added(logits, labels)])

    def added(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the sums of one batch.

        Args:
            logits: (N, C) outputs.
            labels: (N,) labels.

        Returns:
            A vector in float64.

        Raises:
            FedLDError: the user's function returns no tensor.
        """
        sums = self.sums(logits, labels)
        if not isinstance(sums, Tensor):
            raise FedLDError(
                f"metric '{name_of(self.sums)}' gives {type(sums).__name__}, not a tensor of sums"
            )
        return sums.double()

    def merged(self, sums: Iterable[Tensor]) -> float:
        """Compute the measure of all batches together.

        Args:
            sums: what `added` returned for each batch.

        Returns:
            The value.
        """
        return float(self.value(torch.stack(list(sums)).sum(0)))


@dataclass(frozen=True)
class PerSample:
    """Mean over samples of what a user's function gives for each of them."""

    function: Callable[[Tensor, Tensor], Tensor]

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum of the values and number of samples."""
        values = self.function(logits, labels)
        if not isinstance(values, Tensor) or values.shape != labels.shape:
            form = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise FedLDError(
                f"metric '{name_of(self.function)}' gives {form} for {len(labels)} samples: one value per "
                "sample is needed, or a fedld.Metric of sums"
            )
        return torch.stack([values.double().sum(), torch.tensor(float(len(labels)), dtype=torch.float64)])

    def value(self, sums: Tensor) -> Tensor:
        """Give the mean."""
        return sums[0] / sums[1]


def as_metric(value: object) -> Metric:
    """Give a metric as it is.

    a function of (logits, labels) that gives one value per sample made into one.
    """
    if isinstance(value, Metric):
        return value
    if not callable(value):
        raise FedLDError(f"a metric is a fedld.Metric or a function of (logits, labels), not {value!r}")
    each = PerSample(value)
    return Metric(sums=each.sums, value=each.value)


def confusions(logits: Tensor, labels: Tensor) -> Tensor:
    """Count (C * (C + 1)) by true and predicted class; the last column has no finite prediction."""
    classes = logits.shape[1]
    predicted = torch.where(logits.isfinite().all(1), logits.argmax(1), classes)
    return torch.bincount(labels * (classes + 1) + predicted, minlength=classes * (classes + 1))


def _square(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Count (C, C) of finite predictions, and the samples of every class, all of them."""
    side = int(len(sums) ** 0.5)
    counts = sums.view(side, side + 1)
    return counts[:, :side], counts.sum(1)


def macro_f1(sums: Tensor) -> Tensor:
    """Compute the mean over the classes that occur of 2 TP / (2 TP + FP + FN)."""
    counts, totals = _square(sums)
    present = totals > 0
    scores = 2 * counts.diag() / (counts.sum(0) + totals).clamp_min(1)
    return scores[present].mean()


def kappa(sums: Tensor) -> Tensor:
    """Compute the quadratically weighted kappa (Cohen 1968): agreement on ordered grades beyond chance.

    It is nan where a prediction is not finite: no grade is as far off as that.
    """
    counts, totals = _square(sums)
    if counts.sum() < totals.sum():
        return torch.tensor(torch.nan)
    grades = torch.arange(len(counts), dtype=counts.dtype)
    cost = (grades[:, None] - grades[None, :]).square()
    expected = counts.sum(1)[:, None] * counts.sum(0)[None, :] / counts.sum()
    return 1 - (cost * counts).sum() / (cost * expected).sum()


def sensitivity(sums: Tensor) -> Tensor:
    """Compute the recall of the last class, the positive one of two."""
    counts, totals = _square(sums)
    return counts[-1, -1] / totals[-1]


def specificity(sums: Tensor) -> Tensor:
    """Compute the share of the samples of all other classes that are taken for one of them."""
    counts, totals = _square(sums)
    return counts[:-1, :-1].sum() / totals[:-1].sum()


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute histograms (2 * BINS) of the last class's probability, of its own samples and of the others.

    A prediction that is not finite counts as wrong: lowest for the class itself, highest for the others.
    """
    positive = (labels == logits.shape[1] - 1).long()
    probability = torch.where(logits.isfinite().all(1), logits.softmax(1)[:, -1], 1.0 - positive)
    bins = (probability * BINS).long().clamp(max=BINS - 1)
    return torch.bincount((1 - positive) * BINS + bins, minlength=2 * BINS)


def sensitivity_at_95(sums: Tensor) -> Tensor:
    """Compute the sensitivity at a specificity of at least 0.95, with thresholds to a thousandth."""
    positive, negative = (part.flip(0).cumsum(0) for part in sums.view(2, BINS))
    allowed = negative <= 0.05 * negative[-1]
    best: Tensor = torch.where(allowed, positive, 0).max() / positive[-1]
    return best


METRICS: Registry[Metric] = Registry(
    "metric",
    {
        "macro-f1": Metric(sums=confusions, value=macro_f1),
        "kappa": Metric(sums=confusions, value=kappa),
        "sensitivity": Metric(sums=confusions, value=sensitivity),
        "specificity": Metric(sums=confusions, value=specificity),
        "sensitivity-at-95": Metric(sums=scores, value=sensitivity_at_95),
    },
    accept=as_metric,
)
METRICS.load_plugins()
