"""Signs that a lead comes from the baseline's learning rate, or from too few rounds."""

import shlex
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

from fedld.records.reader import Run, by_label
from fedld.study.measures import finite_scores
from fedld.tasks.measure import Measure

if TYPE_CHECKING:
    from fedld.study.comparison import Comparison

RISE = 1.0  # points (of measures without a unit hundredths) over the last fifth of the rounds
OTHER_LENGTH = 1.5  # factor from which a measured step says that the average's length is wrong


def rate_warnings(comparison: "Comparison") -> list[str]:
    """Whether measured steps or rising curves speak against the baseline's learning rate.

    Returns:
        Sentences for the first screen; each offers the command that would tell.
    """
    runs = by_label(comparison.runs)
    if comparison.baseline not in runs:
        return []
    base = runs[comparison.baseline]
    signs = [*_measured(comparison.baseline, runs), *_rising(comparison, runs)]
    command = tune_command(base[0])
    advice = "train longer or tune the learning rate before you believe a lead"
    return [f"{sign}: {advice}: {command}" for sign in signs]


def tune_command(run: Run) -> str:
    """The command that searches a run's learning rate around the one it has."""
    lr = float(run.config.get("lr", 0.05))
    values = ",".join(f"{lr * factor:g}" for factor in (0.25, 0.5, 1, 2, 4))
    config = str(run.path / "config.toml")
    return shlex.join(["fedld", "tune", "--config", config, "--grid", f"lr={values}"])


def _measured(baseline: str, runs: dict[str, list[Run]]) -> list[str]:
    """Clients of another method measured steps: were those of another length than the average's better?"""
    for label, own in runs.items():
        lengths = [length for run in own for length in _chosen_lengths(run)]
        if not lengths:
            continue
        middle = median(lengths)
        if max(middle, 1 / middle) >= OTHER_LENGTH:
            word = "short" if middle > 1 else "long"
            return [
                f"the clients of {label} measured steps of {middle:g} times the average's length as best, so "
                f"the steps of {baseline} are too {word}"
            ]
    return []


def _chosen_lengths(run: Run) -> list[float]:
    trials = [trial for line in run.conflict.lines if (trial := line.get("trial")) is not None]
    return [
        trial["lengths"][trial["chosen"]]
        for trial in trials
        if trial["fallback"] is None and trial["lengths"][trial["chosen"]] > 0
    ]


def _rising(comparison: "Comparison", runs: dict[str, list[Run]]) -> list[str]:
    """Methods that decide and whose primary measure still gets better at the end, in every seed."""
    deciding = [comparison.baseline]
    if comparison.winner is not None and comparison.winner.label != comparison.baseline:
        deciding.append(comparison.winner.label)
    shown = comparison.shown
    rises = {label: _rise(runs[label], shown, comparison.round) for label in deciding if label in runs}
    least = RISE if shown.unit == "%" else RISE / 100
    named = [
        f"{label} ({shown.sign * rise:+.{shown.digits}f}{shown.points})"
        for label, rise in rises.items()
        if rise >= least
    ]
    if not named:
        return []
    verb = "rises" if shown.sign > 0 else "falls"
    return [f"the {shown.title} of {' and '.join(named)} still {verb} over the last fifth of the rounds"]


def _rise(runs: Sequence[Run], measure: Measure, at: int) -> float:
    """Mean gain of the last fifth of the rounds over the fifth before; 0 unless every seed gains."""
    gains = []
    for run in runs:
        values = np.array(list(finite_scores(run, measure, at).values()))
        part = max(2, len(values) // 5)
        if len(values) < 2 * part:
            return 0.0
        gains.append(measure.sign * float(values[-part:].mean() - values[-2 * part : -part].mean()))
    return fmean(gains) if gains and min(gains) > 0 else 0.0
