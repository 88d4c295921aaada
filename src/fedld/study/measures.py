"""What methods are compared by: the measures of a run's global model, and the rounds, traffic and time that
reaching a target accuracy takes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fedld.errors import FedLDError, unknown_name
from fedld.records.reader import Evaluated, Run, clean, number
from fedld.tasks.measure import Measure

Series = dict[int, float]
"""Round, value."""


def check_primary(name: str | None, measures: Iterable[str]) -> str:
    """Choose the measure that decides a comparison: the first one unless another is named."""
    names = list(measures)
    if name is None:
        return names[0]
    if name not in names:
        raise unknown_name("primary measure", name, names)
    return name


def measures_of(runs: Iterable[Run]) -> dict[str, Measure]:
    """Collect the measures of some runs by name, in the order of the first run that has them."""
    measures: dict[str, Measure] = {}
    for run in runs:
        for name, measure in run.measures.items():
            measures.setdefault(name, measure)
    return measures


def value_of(run: Run, measure: Measure, at: int | None = None) -> float | None:
    """Read a measure in the last evaluation until a round, scaled; None where it is not defined then.

    A model that has diverged since an earlier evaluation has no value of that one.
    """
    series = until(run.scores(measure.name), at)
    last = series[max(series)] if series else float("nan")
    return measure.scaled(last) if np.isfinite(last) else None


def finite_scores(run: Run, measure: Measure, at: int | None = None, of: Evaluated = "test") -> Series:
    """Read a measure in every evaluation until a round where it is a number, scaled."""
    series = until(run.scores(measure.name, of), at)
    return {round_: measure.scaled(value) for round_, value in series.items() if np.isfinite(value)}


def until(series: Mapping[int, float], at: int | None) -> Series:
    """Take the part of a series until a round."""
    return {round_: value for round_, value in series.items() if at is None or round_ <= at}


def client_scores(run: Run, measure: Measure) -> dict[str, float]:
    """Read a measure of the last global model on every client's own test set, scaled; empty without one."""
    for line in reversed(run.rounds.lines):
        tables = line.get("client_tests")
        if isinstance(tables, dict) and tables:
            values = {clean(name): number(scores.get(measure.name)) for name, scores in tables.items()}
            return {name: measure.scaled(v) for name, v in values.items() if np.isfinite(v)}
    return {}


def training_scores(run: Run, measure: Measure) -> dict[str, float]:
    """Read a measure of the incoming model on every client's training data in its last round, scaled."""
    latest = {line["client"]: line.get("before") for line in run.clients.lines if "client" in line}
    values = {
        clean(name): number(scores.get(measure.name))
        for name, scores in latest.items()
        if isinstance(scores, dict)
    }
    return {name: measure.scaled(v) for name, v in values.items() if np.isfinite(v)}


def never_predicted(run: Run) -> list[str]:
    """List classes of the test set that the final model predicts for none of its images."""
    counts = confusion_of(run)
    if counts is None or run.predictions is None:
        return []
    classes = run.predictions.get("classes")
    names = [clean(name) for name in classes] if isinstance(classes, list) else []
    missing = np.flatnonzero((counts.sum(axis=1) > 0) & (counts[:, : len(counts)].sum(axis=0) == 0))
    return [names[k] if k < len(names) else f"class {k}" for k in missing]


def confusion_of(run: Run) -> np.ndarray | None:
    """Read the confusion matrix of the final model; None where it is missing or damaged."""
    value = run.predictions.get("confusion") if run.predictions else None
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    sound = matrix.ndim == 2 and matrix.shape[1] - matrix.shape[0] in (0, 1) and matrix.sum() > 0
    return matrix if sound and np.isfinite(matrix).all() else None


def chance_level(runs: Sequence[Run]) -> float | None:
    """Compute the balanced accuracy (%) of guessing: one over the number of test classes; None if unknown."""
    counts = next((matrix for run in runs if (matrix := confusion_of(run)) is not None), None)
    return None if counts is None else 100 / int((counts.sum(axis=1) > 0).sum())


def mean_of(values: Sequence[float | None]) -> float | None:
    """Average the finite values; None without any."""
    numbers = [value for value in values if value is not None and np.isfinite(value)]
    return fmean(numbers) if numbers else None


DEFAULT_TARGET = "0.5"
_TARGET_FORM = re.compile(r"(?P<points>\d+(\.\d+)?)(@(?P<accuracy>\d+(\.\d+)?))?")


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
        match = _TARGET_FORM.fullmatch(text.strip())
        if match is None:
            raise FedLDError(
                f"a target is 'POINTS' below the baseline's final accuracy or 'POINTS@ACCURACY' in percent, "
                f"such as 0.5 or 0.5@85, not '{text}'"
            )
        accuracy = match["accuracy"]
        return cls(float(match["points"]), None if accuracy is None else float(accuracy))

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
        """Give plain data."""
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
    shared = sorted(set.intersection(*(set(by_round) for by_round in series))) if series else []
    first = None
    for round_ in reversed(shared):
        if fmean(by_round[round_] for by_round in series) < level - 1e-9:
            break
        first = round_
    if first is None:
        return None
    up, down, seconds = (
        fmean(_sum_until(run, key, first) for run in runs) for key in ("bytes_up", "bytes_down", "seconds")
    )
    return Reached(first, up / 1e6, down / 1e6, seconds)


def _sum_until(run: Run, key: str, round_: int) -> float:
    """Add up a column of a run's rounds until one of them."""
    values = (number(line.get(key)) for line in run.rounds.lines if line["round"] <= round_)
    return sum(value for value in values if value == value)
