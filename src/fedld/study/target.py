"""Rounds, traffic and time until a method has reached an accuracy and stays there."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from fedld.errors import FedLDError
from fedld.records.reader import Run, number
from fedld.study.measures import finite_scores
from fedld.tasks.measure import Measure

DEFAULT = "0.5"
_FORM = re.compile(r"(?P<points>\d+(\.\d+)?)(@(?P<accuracy>\d+(\.\d+)?))?")


@dataclass(frozen=True)
class Target:
    """An accuracy to be reached, in percent: `points` below a given one, or the baseline's final one."""

    points: float
    accuracy: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read a target as users write it.

        >>> Target.parse("0.5"), Target.parse("1@82.4")
        (Target(points=0.5, accuracy=None), Target(points=1.0, accuracy=82.4))
        """
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise FedLDError(
                f"a target is 'POINTS' below the baseline's final accuracy or 'POINTS@ACCURACY' in percent, "
                f"such as 0.5 or 0.5@85, not '{text}'"
            )
        given = found["accuracy"]
        return cls(float(found["points"]), None if given is None else float(given))

    def level(self, baseline: float | None) -> float | None:
        """Give the accuracy to be reached, from the baseline's final accuracy; None where that is unknown."""
        goal = baseline if self.accuracy is None else self.accuracy
        return None if goal is None else goal - self.points


@dataclass(frozen=True)
class Reached:
    """The first evaluated round from which on the mean over seeds is at the target, and its cost."""

    round: int
    megabytes_up: float
    megabytes_down: float
    seconds: float

    @property
    def megabytes(self) -> float:
        """Both ways."""
        return self.megabytes_up + self.megabytes_down

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def reached(runs: Sequence[Run], accuracy: Measure, level: float, at: int) -> Reached | None:
    """Find when some runs, which differ by their seed, reach an accuracy in percent and stay there.

    Args:
        runs: a method's runs.
        accuracy: the measure.
        level: the accuracy to be reached.
        at: the last round that counts.

    Returns:
        The round and its cost as means over the runs, or None where the target is not reached.
    """
    series = [finite_scores(run, accuracy, at) for run in runs]
    shared = sorted(set.intersection(*(set(one) for one in series))) if series else []
    first = None
    for round_ in reversed(shared):
        if fmean(one[round_] for one in series) < level - 1e-9:
            break
        first = round_
    if first is None:
        return None
    up, down, seconds = (
        fmean(_until(run, key, first) for run in runs) for key in ("bytes_up", "bytes_down", "seconds")
    )
    return Reached(first, up / 1e6, down / 1e6, seconds)


def _until(run: Run, key: str, round_: int) -> float:
    """Add up a column of a run's rounds until one of them."""
    values = (number(line.get(key)) for line in run.rounds.lines if line["round"] <= round_)
    return sum(value for value in values if value == value)
