"""A measure: one description of a quantity, for records, tables, curves, verdicts, tuning and trackers.

Nothing here imports torch: whoever reads records needs names, units and digits only.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedld.tasks.tally import Tally

Better = Literal["more", "less"]
Scores = dict[str, float | None]
"""Values of measures by name, and `count`, the number of samples; None where a value is not defined."""
LAST = 5
"""Evaluations at the end of a run whose mean is reported beside the last value."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A named quantity, with what tables, curves, verdicts, tuning and trackers need to show it.

    Attributes:
        name: name in records, options and files.
        title: name in tables and sentences.
        unit: unit of the value as it is shown.
        scale: shown value / recorded value: 100 for a share that is shown in percent.
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
        """Convert a recorded value to the shown one; nothing else multiplies by 100.

        Args:
            value: as in the records.

        Returns:
            As in tables.
        """
        return self.scale * value

    def recorded(self, value: float) -> float:
        """Convert a shown value to the recorded one.

        Args:
            value: as in tables.

        Returns:
            As in the records.
        """
        return value / self.scale

    def format(self, value: float) -> str:
        """Write a shown value with its unit.

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
    """Mean of the last five values.

    >>> last_mean([9.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    3.0
    """
    return fmean(values[-LAST:])


def known(values: Sequence[float | None]) -> list[float]:
    """The values that are finite numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]
