"""Survival: a time and whether it ends in an event; by Cox's partial likelihood, or in intervals of time.

Cox: the loss of a client is a mean over its samples of log sum exp(risk of those still at risk) - own risk,
for samples with an event (Breslow's ties). Risk sets never cross clients, so the mean over clients is a
mean loss and decomposes like any other (Eq. 2 of the paper).

Intervals: the model gives the log odds of an event in each, for samples that have reached it. The loss of a
sample is the sum of the cross-entropies of the intervals that it was seen in. It needs no risk sets, so any
batch has the loss of its own samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure, Tally


def _concordance(tally: Tally) -> float:
    """Compute Harrell's index: the share of comparable pairs in the right order, ties counting half."""
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


INTERVALS = 10


@dataclass(frozen=True)
class SurvivalDiscrete(Task):
    """Outputs (N, K) are log odds of an event in each of K intervals; targets (N, 2) are times and events.

    rate: events per unit of time over all clients. Intervals have the same share of events each under a
        constant rate; the last one is open.
    """

    name: ClassVar[str] = "survival-discrete"
    kind: ClassVar[str] = "survival"
    measures: ClassVar[tuple[Measure, ...]] = (CONCORDANCE, WORST_CLIENT, LOSS)
    rate: float = 1.0

    @property
    def cuts(self) -> list[float]:
        """Where intervals end, but for the last one.

        >>> [round(cut, 2) for cut in SurvivalDiscrete(rate=0.1).cuts[:3]]
        [1.05, 2.23, 3.57]
        """
        return [-math.log1p(-k / INTERVALS) / self.rate for k in range(1, INTERVALS)]

    def output_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of the intervals."""
        return tuple(f"interval {k}" for k in range(1, INTERVALS + 1))

    def target_sums(self, targets: NDArray[np.generic]) -> dict[str, float]:
        """Give the number of events and the sum of all times."""
        values = np.asarray(targets, np.float64)
        return {"events": float(values[:, 1].sum()), "time": float(values[:, 0].sum())}

    def fitted(self, clients: Sequence[Mapping[str, float]], names: Sequence[str]) -> "SurvivalDiscrete":
        """Take the rate from sums over the clients' training targets."""
        events = sum(sums["events"] for sums in clients)
        time = sum(sums["time"] for sums in clients)
        return replace(self, rate=events / time) if events > 0 and time > 0 else self

    @property
    def constants(self) -> tuple[float, float]:
        """The rate, as a model file keeps it."""
        return 0.0, self.rate

    def with_constants(self, constants: Sequence[float]) -> "SurvivalDiscrete":
        """Give the task with the rate of a model file."""
        return replace(self, rate=float(constants[1]))

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean loss of a batch."""
        return hazard_losses(outputs, self.places(targets), targets[:, 1]).mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the loss of every sample.

        >>> SurvivalDiscrete().losses(torch.zeros(2, 10), torch.tensor([[0.0, 1.0], [0.2, 0.0]]))
        tensor([0.6931, 0.6931], dtype=torch.float64)
        """
        return hazard_losses(outputs.double(), self.places(targets), targets[:, 1])

    def places(self, targets: Tensor) -> Tensor:
        """Give the interval of every time."""
        cuts = torch.tensor(self.cuts, dtype=torch.float64, device=targets.device)
        return torch.bucketize(targets[:, 0].double(), cuts, right=True)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give the numbers of comparable and concordant pairs, and of events."""
        pairs = concordance(self.risks(outputs).numpy(), targets.double().numpy())
        return {"concordant": pairs[0], "comparable": pairs[1], "events": float(targets[:, 1].sum())}

    def risks(self, outputs: Tensor) -> Tensor:
        """Give log(-log of the probability to survive all intervals)."""
        return torch.log(F.softplus(outputs.double()).sum(1))

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the risk, and the probability to survive each interval but the last."""
        survived = torch.exp(-F.softplus(outputs.double()).cumsum(1))
        columns = {"predicted": [f"{value:.9g}" for value in self.risks(outputs).tolist()]}
        for k, cut in enumerate(self.cuts):
            columns[f"survival_{cut:.4g}"] = [f"{value:.9g}" for value in survived[:, k].tolist()]
        return columns

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Give 1 for samples with an event, else 0."""
        return Survival().strata(targets)

    def strata_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of these groups."""
        return Survival().strata_names(names)

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give times and events."""
        return Survival().targets(targets, names)

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give outputs and targets to try functions on."""
        return torch.zeros(4, outputs), Survival().batch(1)[1]


def hazard_losses(outputs: Tensor, places: Tensor, events: Tensor) -> Tensor:
    """Give -log likelihood: a sample survives each interval before its own, which has its event or is open.

    Args:
        outputs: (N, K) log odds of an event in each interval.
        places: (N,) interval of every time.
        events: (N,) 1 or 0; without an event the last interval was not seen to its end.
    """
    before = torch.arange(outputs.shape[1], device=outputs.device) < places[:, None]
    survived = torch.where(before, F.softplus(outputs), 0.0).sum(1)
    at_end = torch.gather(outputs, 1, places[:, None])[:, 0]
    return survived + F.softplus(-at_end) * events.to(outputs.dtype)
