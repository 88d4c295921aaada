"""Measures and what they are computed from: tallies, which are sums over samples that merge.

A measure is one description of a quantity, for records, tables, curves, verdicts, tuning and trackers.
Clients, sites and the server exchange tallies, so a mean over any union of samples is right. Predictions of
single samples are kept only where the samples are, for measures that sums cannot give (the area under a ROC
curve, calibration); they are never sent. Nothing here imports torch or NumPy, which readers of records do
without.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:  # readers of records start without NumPy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SamplePredictions:
    """Outputs (N, ...) and targets (N, ...) of samples: in float64 unless there is one for every pixel."""

    outputs: "NDArray[np.float64]"
    targets: "NDArray[np.generic]"

    def __getitem__(self, rows: "NDArray[np.int64]") -> "SamplePredictions":
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
        """Give the sums alone."""
        return Tally(self.count, self.loss, self.loss_squared, self.sums)

    def share(self, name: str) -> float:
        """Give one of the sums divided by the number of samples; nan without samples."""
        return self.sums[name] / self.count if self.count else float("nan")


@dataclass(frozen=True)
class SampleTally(Tally):
    """A tally that has the predictions of every sample beside the sums; it stays where the samples are."""

    predictions: SamplePredictions = field(kw_only=True)


EMPTY = Tally(0, float("nan"), float("nan"))


def merged(tallies: Iterable[Tally]) -> Tally:
    """Give one tally of all samples; predictions are dropped.

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


Better = Literal["more", "less"]
Scores = dict[str, float | None]
"""Values of measures by name, and `count`, the number of samples; None where a value is not defined."""
LAST = 5
"""Evaluations at the end of a run; their mean is reported beside the last value."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A named quantity, with what tables, curves, verdicts, tuning and trackers need to show it.

    Attributes:
        name: name in records, options and files.
        title: name in tables and sentences.
        unit: unit of the value in tables.
        scale: value in tables / recorded value: 100 for a share that tables have in percent.
        digits: digits after the point.
        better: whether "more" or "less" is better.
        value: function from a tally to the recorded value; None where the measure was read from a file.
        exact: whether the value needs every prediction (`SampleTally`), not only sums.
        worst: name of the measure of which this one is the worst client's value, if it is one.
        minor: whether sentences and tables of text leave it out; pages, files and curves have it.

    >>> Measure(name="mae", title="absolute error", unit="mm", digits=1, better="less").format(2.345)
    '2.3 mm'
    """

    name: str
    title: str
    unit: str = ""
    scale: float = 1.0
    digits: int = 4
    better: Better = "more"
    value: "Callable[[Tally], float | None] | None" = None
    exact: bool = False
    worst: str | None = None
    minor: bool = False

    @property
    def sign(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.better == "more" else -1

    @property
    def heading(self) -> str:
        """Title and unit, for the head of a column."""
        return self.title + (f", {self.unit}" if self.unit else "")

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return " points" if self.unit == "%" else ""

    def scaled(self, value: float) -> float:
        """Convert a recorded value to that of tables; nothing else multiplies by 100.

        Args:
            value: as in the records.

        Returns:
            As in tables.
        """
        return self.scale * value

    def recorded(self, value: float) -> float:
        """Convert a value of a table to the recorded one.

        Args:
            value: as in tables.

        Returns:
            As in the records.
        """
        return value / self.scale

    def format(self, value: float) -> str:
        """Write a value of a table with its unit.

        Args:
            value: as in tables.

        Returns:
            The text.

        >>> Measure(name="accuracy", title="accuracy", unit="%", scale=100, digits=2).format(61.5)
        '61.50 %'
        """
        return f"{value:.{self.digits}f}" + (f" {self.unit}" if self.unit else "")

    def best(self, values: Sequence[float]) -> float:
        """Choose the best of some values.

        Args:
            values: at least one.

        Returns:
            The largest, or the smallest where less is better.
        """
        return max(values) if self.better == "more" else min(values)

    def worst_of(self, values: Sequence[float]) -> float:
        """Choose the worst of some values.

        Args:
            values: at least one.

        Returns:
            The smallest, or the largest where less is better.
        """
        return min(values) if self.better == "more" else max(values)

    def to_json(self) -> dict[str, Any]:
        """Describe the measure for a file.

        Returns:
            All attributes but the function.
        """
        plain = asdict(replace(self, value=None))
        del plain["value"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Measure":
        """Read a measure from its description in a file; values of the wrong type become the default.

        Args:
            plain: what `to_json` returned.

        Returns:
            The measure, without a function.

        >>> Measure.from_json(Measure(name="mae", title="error", better="less").to_json()).better
        'less'
        """
        name = str(plain.get("name"))
        scale, digits = plain.get("scale"), plain.get("digits")
        worst = plain.get("worst")
        return cls(
            name=name,
            title=str(plain.get("title") or name),
            unit=str(plain.get("unit") or ""),
            scale=float(scale) if isinstance(scale, int | float) and scale else 1.0,
            digits=digits if isinstance(digits, int) and 0 <= digits <= 9 else 4,
            better="less" if plain.get("better") == "less" else "more",
            exact=plain.get("exact") is True,
            worst=worst if isinstance(worst, str) else None,
            minor=plain.get("minor") is True,
        )


def last_mean(values: Sequence[float]) -> float:
    """Compute the mean of the last five values.

    >>> last_mean([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    3.0
    """
    return fmean(values[-LAST:])


def finite_values(values: Sequence[float | None]) -> list[float]:
    """Give the values that are finite numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]
