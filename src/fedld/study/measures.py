"""What methods are compared by: the measures of a run's global model, and how they are shown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedld.errors import FedLDError, nearest
from fedld.records.reader import Run, clean, number
from fedld.records.schema import RoundColumn, RoundLine

Series = dict[int, float]
"""Round, value."""


@dataclass(frozen=True)
class Shown:
    """A measure's name in tables and sentences, its unit, and which way is better."""

    name: str
    unit: str = ""
    factor: float = 1.0
    digits: int = 2
    better: int = 1  # 1: more, -1: less

    @property
    def points(self) -> str:
        """The unit of a difference."""
        return " points" if self.unit == "%" else ""

    def format(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:.{self.digits}f}" + (f" {self.unit}" if self.unit else "")


MEASURES = {
    "accuracy": Shown("accuracy", "%", 100),
    "balanced_accuracy": Shown("balanced accuracy", "%", 100),
    "auroc": Shown("AUROC", digits=4),
    "worst_client": Shown("worst client's accuracy", "%", 100),
    "loss": Shown("loss", digits=4, better=-1),
    "ece": Shown("calibration error", digits=3, better=-1),
}
_RECORDED: dict[str, RoundColumn] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced_accuracy",
    "auroc": "auroc",
    "loss": "loss",
    "ece": "ece",
}
PRIMARY = ("accuracy", "balanced_accuracy", "auroc", "worst_client")


def check_primary(name: str, further: Iterable[str] = ()) -> str:
    """The measure that decides a comparison, one of `further` where those are measured, or a sentence."""
    known = [*PRIMARY, *further]
    if name not in known:
        raise FedLDError(f"unknown primary measure '{name}': {nearest(name, known)}")
    return name


def further_measures(runs: Iterable[Run]) -> dict[str, Shown]:
    """The measures that users added to the runs (`--metric`), and how they are shown."""
    found: dict[str, Shown] = {}
    for run in runs:
        less = run.summary.get("less_is_better", []) if run.summary else []
        for name in {name: None for line in run.rounds.lines for name in _further(line)}:
            found.setdefault(name, Shown(clean(name), digits=4, better=-1 if name in less else 1))
    return found


def _further(line: RoundLine) -> dict[str, float | None]:
    """What a line says of measures that users added; a damaged line says nothing."""
    metrics = line.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def value_of(run: Run, measure: str, at: int) -> float | None:
    """The last finite value of a run's measure until a round, in the measure's unit."""
    if measure == "worst_client":
        accuracies = client_accuracies(run, at)[0]
        return min(accuracies.values()) if accuracies else None
    if measure not in MEASURES:
        further = {line["round"]: number(_further(line).get(measure)) for line in run.rounds.lines}
        known = {round_: v for round_, v in further.items() if np.isfinite(v) and round_ <= at}
        return known[max(known)] if known else None
    series = finite_series(run, _RECORDED[measure], at)
    return MEASURES[measure].factor * series[max(series)] if series else None


def finite_series(run: Run, key: RoundColumn, at: int | None = None) -> Series:
    """A recorded measure where it is a number, until a round."""
    return {r: v for r, v in run.series(key).items() if np.isfinite(v) and (at is None or r <= at)}


def client_accuracies(run: Run, at: int | None = None) -> tuple[dict[str, float], str]:
    """Accuracy (%) of the global model at every client: on its own test set, else on its training data."""
    for line in reversed(run.rounds.lines):
        own = line.get("client_accuracy")
        if isinstance(own, dict) and own and (at is None or line["round"] <= at):
            values = {clean(k): 100 * number(v) for k, v in own.items()}
            return {name: v for name, v in values.items() if np.isfinite(v)}, "own test set"
    latest = {x["client"]: x for x in run.clients.lines if "client" in x and (at is None or x["round"] <= at)}
    values = {clean(name): 100 * number(line.get("accuracy_before")) for name, line in latest.items()}
    return {name: v for name, v in values.items() if np.isfinite(v)}, "own training data"


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
