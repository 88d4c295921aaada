"""Tallies: sums over samples that merge, and from which measures are computed.

Clients, sites and the server exchange tallies, so a mean over any union of samples is right. Predictions of
single samples are kept only where the samples are, for measures that sums cannot give (the area under a ROC
curve, calibration); they are never sent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SamplePredictions:
    """Outputs (N, ...) and targets (N, ...) of samples: in float64 unless there is one for every pixel."""

    outputs: Floats
    targets: NDArray[np.generic]

    def __getitem__(self, rows: NDArray[np.int64]) -> "SamplePredictions":
        return SamplePredictions(self.outputs[rows], self.targets[rows])


@dataclass(frozen=True)
class Tally:
    """Sums over samples.

    count         samples
    loss          sum of their losses
    loss_squared  sum of the squares of their losses
    sums          further sums of the task, by name, such as the number of right answers
    """

    count: Annotated[int, Field(ge=0, lt=2**53)]
    loss: float
    loss_squared: float
    sums: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")], float], Field(max_length=64)
    ] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean loss; nan without samples."""
        return self.loss / self.count if self.count else float("nan")

    @property
    def standard_error(self) -> float:
        """Standard error of the mean loss, when the samples are a random part of the client's."""
        if self.count < 2:
            return float("nan")
        variance = (self.loss_squared - self.loss**2 / self.count) / (self.count - 1)
        return float((max(variance, 0.0) / self.count) ** 0.5)

    def without_samples(self) -> "Tally":
        """The sums alone."""
        return Tally(self.count, self.loss, self.loss_squared, self.sums)

    def share(self, name: str) -> float:
        """One of the sums divided by the number of samples; nan without samples."""
        return self.sums[name] / self.count if self.count else float("nan")


@dataclass(frozen=True)
class SampleTally(Tally):
    """A tally that has the predictions of every sample beside the sums; it stays where the samples are."""

    predictions: SamplePredictions = field(kw_only=True)


EMPTY = Tally(0, float("nan"), float("nan"))


def merged(tallies: Iterable[Tally]) -> Tally:
    """One tally of all samples; predictions are dropped.

    >>> merged([Tally(2, 1.0, 0.5, {"correct": 1}), Tally(1, 2.0, 4.0, {"correct": 1})])
    Tally(count=3, loss=3.0, loss_squared=4.5, sums={'correct': 2})
    """
    parts = [tally for tally in tallies if tally.count]
    if not parts:
        return EMPTY
    names = parts[0].sums
    return Tally(
        sum(tally.count for tally in parts),
        sum(tally.loss for tally in parts),
        sum(tally.loss_squared for tally in parts),
        {name: sum(tally.sums.get(name, math.nan) for tally in parts) for name in names},
    )
