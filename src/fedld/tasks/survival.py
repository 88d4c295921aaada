"""Survival: a time and whether it ends in an event; Cox's partial likelihood, stratified by client.

The loss of a client is a mean over its samples of log sum exp(risk of those still at risk) - own risk, for
samples with an event (Breslow's ties). Risk sets never cross clients, so the mean over clients is a mean loss
and decomposes like any other (Eq. 2 of the paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure
from fedld.tasks.tally import Tally


def _concordance(tally: Tally) -> float:
    """Harrell's index: the share of comparable pairs in the right order, ties counting half."""
    pairs = tally.sums["comparable"]
    return tally.sums["concordant"] / pairs if pairs else float("nan")


CONCORDANCE = Measure(name="concordance", title="concordance index", value=_concordance)
WORST_CLIENT = Measure(name="worst_client", title="worst client's concordance index", worst="concordance")
LOSS = Measure(name="loss", title="loss", better="less", value=lambda tally: tally.mean)


@dataclass(frozen=True)
class Survival(Task):
    """Outputs (N, 1) are log risks; targets (N, 2) are times and events."""

    name: ClassVar[str] = "survival"
    measures: ClassVar[tuple[Measure, ...]] = (CONCORDANCE, WORST_CLIENT, LOSS)

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of a batch, the risk sets within it."""
        return partial_likelihood(outputs[:, 0], targets).mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the loss of every sample, the risk sets within these samples; 0 where there is no event."""
        return partial_likelihood(outputs[:, 0].double(), targets)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give the numbers of comparable and concordant pairs, and of events."""
        concordant, comparable = concordance(outputs[:, 0].double().numpy(), targets.double().numpy())
        events = float(targets[:, 1].sum())
        return {"concordant": concordant, "comparable": comparable, "events": events}

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the log risks."""
        return {"predicted": [f"{value:.9g}" for value in outputs[:, 0].tolist()]}

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Give 1 for samples with an event, else 0."""
        return np.asarray(targets)[:, 1].astype(np.int64)

    def strata_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of these groups."""
        return ("censored", "event")

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give times and events."""
        rows = np.asarray(targets, np.float64)
        return {"time": [f"{t:.9g}" for t in rows[:, 0]], "label": [f"{e:g}" for e in rows[:, 1]]}

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give outputs and targets to try functions on."""
        return torch.zeros(4, 1), torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 1.0]])


def partial_likelihood(risk: Tensor, targets: Tensor) -> Tensor:
    """Give log sum_{j: t_j >= t_i} exp(r_j) - r_i of every sample i with an event, else 0.

    >>> partial_likelihood(torch.zeros(2), torch.tensor([[1.0, 1.0], [2.0, 1.0]]))
    tensor([0.6931, 0.0000])
    """
    times, events = targets[:, 0], targets[:, 1].to(risk.dtype)
    order = torch.argsort(times, descending=True, stable=True)
    sums = torch.logcumsumexp(risk[order], 0)
    # Of equal times all are at risk: each takes the sum at the last of them in this order.
    last = torch.searchsorted(-times[order], -times, right=True) - 1
    return (sums[last] - risk) * events


def concordance(risk: NDArray[np.float64], targets: NDArray[np.float64]) -> tuple[float, float]:
    """Count concordant and comparable pairs (Harrell et al. 1996); nan risks are never concordant.

    A pair is comparable if the earlier time is an event; at equal times, if exactly one of them is.

    >>> concordance(np.array([2.0, 1.0, 3.0]), np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 0.0]]))
    (1.0, 3.0)
    """
    times, events = targets[:, 0], targets[:, 1] > 0
    concordant = comparable = 0.0
    for i in np.flatnonzero(events):
        later = (times > times[i]) | ((times == times[i]) & ~events)
        comparable += float(later.sum())
        others = risk[later]
        concordant += float((risk[i] > others).sum()) + 0.5 * float((risk[i] == others).sum())
    return concordant, comparable
