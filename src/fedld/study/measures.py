"""What methods are compared by: the measures of a run's global model, as its records describe them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np

from fedld.errors import unknown_name
from fedld.records.reader import Evaluated, Run, clean, number
from fedld.tasks.measure import Measure

Series = dict[int, float]
"""Round, value."""


def check_primary(name: str | None, measures: Iterable[str]) -> str:
    """The measure that decides a comparison: the first one unless another is named."""
    names = list(measures)
    if name is None:
        return names[0]
    if name not in names:
        raise unknown_name("primary measure", name, names)
    return name


def measures_of(runs: Iterable[Run]) -> dict[str, Measure]:
    """The measures of some runs by name, in the order of the first run that has them."""
    found: dict[str, Measure] = {}
    for run in runs:
        for name, measure in run.measures.items():
            found.setdefault(name, measure)
    return found


def value_of(run: Run, measure: Measure, at: int | None = None) -> float | None:
    """A measure in the last evaluation until a round, as it is shown; None where it is not defined then.

    A model that has diverged since an earlier evaluation has no value of that one.
    """
    series = until(run.scores(measure.name), at)
    last = series[max(series)] if series else float("nan")
    return measure.scaled(last) if np.isfinite(last) else None


def finite_scores(run: Run, measure: Measure, at: int | None = None, of: Evaluated = "test") -> Series:
    """A measure in every evaluation where it is a number, until a round, as it is shown."""
    series = until(run.scores(measure.name, of), at)
    return {round_: measure.scaled(value) for round_, value in series.items() if np.isfinite(value)}


def until(series: Mapping[int, float], at: int | None) -> Series:
    """The part of a series until a round."""
    return {round_: value for round_, value in series.items() if at is None or round_ <= at}


def client_scores(run: Run, measure: Measure) -> dict[str, float]:
    """A measure of the last global model on every client's own test set, as it is shown; none without one."""
    for line in reversed(run.rounds.lines):
        tables = line.get("client_tests")
        if isinstance(tables, dict) and tables:
            values = {clean(name): number(scores.get(measure.name)) for name, scores in tables.items()}
            return {name: measure.scaled(v) for name, v in values.items() if np.isfinite(v)}
    return {}


def training_scores(run: Run, measure: Measure) -> dict[str, float]:
    """A measure of the incoming model on every client's training data when it last took part, as shown."""
    latest = {line["client"]: line.get("before") for line in run.clients.lines if "client" in line}
    values = {
        clean(name): number(scores.get(measure.name))
        for name, scores in latest.items()
        if isinstance(scores, dict)
    }
    return {name: measure.scaled(v) for name, v in values.items() if np.isfinite(v)}


def never_predicted(run: Run) -> list[str]:
    """Classes that the test set has and the final model predicts for none of its images."""
    counts = confusion_of(run)
    if counts is None or run.predictions is None:
        return []
    known = run.predictions.get("classes")
    names = [clean(name) for name in known] if isinstance(known, list) else []
    missing = np.flatnonzero((counts.sum(axis=1) > 0) & (counts[:, : len(counts)].sum(axis=0) == 0))
    return [names[k] if k < len(names) else f"class {k}" for k in missing]


def confusion_of(run: Run) -> np.ndarray | None:
    """Confusion matrix of the final model; None where it was not written or is damaged."""
    value = run.predictions.get("confusion") if run.predictions else None
    try:
        matrix = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    sound = matrix.ndim == 2 and matrix.shape[1] - matrix.shape[0] in (0, 1) and matrix.sum() > 0
    return matrix if sound and np.isfinite(matrix).all() else None


def chance_level(runs: Sequence[Run]) -> float | None:
    """Balanced accuracy (%) of guessing: one over the classes of the test set; None where it is not known."""
    counts = next((found for run in runs if (found := confusion_of(run)) is not None), None)
    return None if counts is None else 100 / int((counts.sum(axis=1) > 0).sum())


def mean_of(values: Sequence[float | None]) -> float | None:
    """Mean of what is known."""
    known = [value for value in values if value is not None and np.isfinite(value)]
    return fmean(known) if known else None
