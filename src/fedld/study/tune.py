"""Tuning on validation images held out from the clients' training data; the test set is never read."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedld.aggregation import Principal
from fedld.config.experiment import Experiment, assign, make_experiment
from fedld.config.resolve import describe_objective, make_measures, make_method
from fedld.engine import loop
from fedld.errors import FedLDError, nearest
from fedld.paths import make_folder
from fedld.records.reader import Run, read_run
from fedld.records.schema import FORMAT
from fedld.records.writer import write_atomically
from fedld.registry import options_of
from fedld.study.grid import Cell, OtherSettings, run_cell
from fedld.study.measures import check_primary
from fedld.tasks.measure import Measure, finite_values, last_mean

Settings = dict[str, Any]
Value = float | int | bool | str
HOLD_OUT = 0.2
"""Share of the training images that a search is judged by, where the setting `hold_out` does not say."""


@dataclass(frozen=True)
class SearchRange:
    """One setting to search: between two ends, or among given values.

    Whole numbers at both ends: only whole numbers are tried.
    """

    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    values: tuple[Value, ...] = ()

    @property
    def log(self) -> bool:
        """Whether the search is on a logarithmic scale: the ends are far apart."""
        return self.step is None and self.low > 0 and self.high >= 10 * self.low


RANGES = {
    "lr": SearchRange(0.001, 0.3),
    "lam": SearchRange(0.001, 1.0),
    "components": SearchRange(0.2, 1.0, step=0.2),
    "mu": SearchRange(0.0001, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class TuningTrial:
    """One choice and its score on the validation images: mean of the last five evaluations and the seeds."""

    number: int
    values: dict[str, Value]
    score: float | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best choice and all others."""

    command: str
    hold_out: float
    primary: str
    seeds: list[int]
    experiment: Experiment
    best: TuningTrial
    trials: list[TuningTrial]

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return (
            {"format": FORMAT}
            | asdict(self)
            | {"experiment": self.experiment.model_dump(mode="json", exclude_none=True)}
        )

    def to_toml(self) -> str:
        """Write the recommended experiment as TOML."""
        choice = ", ".join(f"{name} = {value_text(value)}" for name, value in self.best.values.items())
        return (
            f"# Made by: {self.command}\n# Best of {len(self.trials)} trials on {self.hold_out:.0%} of the "
            f"clients' training images: {choice}\n"
            f"# Validation {self.primary} {self.best.score:.4f}, seeds {self.seeds}\n"
            + self.experiment.to_toml()
        )


def value_text(value: Value) -> str:
    """Format a value in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def ranges_of(settings: Settings, only: Sequence[str] | None = None) -> dict[str, SearchRange]:
    """List the ranges of the method's numbers, or of those that are named."""
    method = make_method(make_experiment(settings))
    has = {
        "lr": True,
        "lam": hasattr(method.objective, "lam"),
        "components": isinstance(method.rule, Principal),
        "mu": "mu" in options_of(method),
    }
    names = [name for name in RANGES if has[name]]
    for name in only or []:
        if name not in names:
            raise FedLDError(f"there is no '{name}' to tune in this method: {nearest(name, names)}")
    return {name: RANGES[name] for name in only or names}


def check_ranges(settings: Settings, ranges: Mapping[str, SearchRange]) -> None:
    """Refuse what cannot be searched: names and values that no experiment has."""
    short = [name for name in ranges if name in RANGES]
    if short:
        ranges_of(settings, short)
    for name, span in ranges.items():
        if not span.values and not span.low < span.high:
            raise FedLDError(f"the range of '{name}' is {span.low} to {span.high}: nothing lies between")
        for value in span.values or (span.low, span.high):
            make_experiment(apply(settings, {name: value}))


def apply(settings: Settings, values: Mapping[str, Value]) -> Settings:
    """Put values into settings: by short names, or by the name of any setting as in `--set`.

    >>> apply({"method": "fedld"}, {"lr": 0.1, "lam": 0.5})
    {'method': 'fedld', 'lr': 0.1, 'objective': {'name': 'marg-log', 'lam': 0.5}}
    """
    method, result = make_method(make_experiment(settings)), dict(settings)
    for name, value in values.items():
        if name == "lr" or name not in RANGES:
            result = assign(result, name, value)
    if "lam" in values:
        result["objective"] = describe_objective(method.objective, lam=values["lam"])
    if "components" in values:
        options = {key: value for key, value in asdict(method.rule).items() if value is not None}
        result["rule"] = {"name": method.rule.name, **options, "components": values["components"]}
    if "mu" in values:
        result = assign(result, "method.mu", values["mu"])
    return result


def tune(
    settings: Settings,
    out: Path,
    *,
    minutes: float,
    trials: int | None = None,
    seeds: Sequence[int] = (0,),
    primary: str | None = None,
    only: Sequence[str] | None = None,
    grid: Mapping[str, tuple[Value, ...]] | None = None,
    ranges: Mapping[str, SearchRange] | None = None,
    resume: bool = False,
    command: str = "",
    progress: Callable[[TuningTrial], None] = lambda trial: None,
) -> Tuned:
    """Search until the minutes (or trials) are spent; write tune.json and tuned.toml.

    The first trial is the settings as they are, so the recommendation is never worse than them on the
    validation images. With a `grid`, the trials are all its combinations and no others; with `ranges`, these
    are searched and no others. Both may name any setting, as `--set` does. `primary` is the measure that
    decides, as in a comparison: balanced accuracy or AUROC where the classes' shares are not those of the
    images that count. The search is seeded, so a resumed one asks the same questions again and finds the
    answers of its finished trials, also by another measure.
    """
    optuna = _optuna()
    hold_out = settings.get("hold_out", HOLD_OUT)
    settings = {key: value for key, value in settings.items() if key != "hold_out"}
    validated_settings = settings | {"hold_out": hold_out}
    done: list[TuningTrial] = []
    if grid:
        ranges = {name: SearchRange(values=values) for name, values in grid.items()}
    if ranges is None:
        ranges = ranges_of(settings, only)
    check_ranges(settings, ranges)
    measures = make_measures(make_experiment(settings))
    primary = check_primary(primary, measures)
    measure = measures[primary]
    if (measure.exact or measure.worst) and not make_method(make_experiment(settings)).has_global:
        first = next(iter(measures))
        raise FedLDError(
            f"a method without a global model is tuned by its own models' {first}: --primary {first}"
        )
    less = measure.better == "less"
    if (out / "trials").exists() and not resume:
        raise FedLDError(f"'{out}' already holds a search: choose another --out, or finish it with --resume")
    make_folder(out / "trials")  # what cannot be written to fails once, before the first trial

    def objective(choice: Any) -> float:
        searched = grid or choice.number
        values = {name: _suggest(choice, name, span) for name, span in ranges.items()} if searched else {}
        trial = _try(
            apply(validated_settings, values),
            values,
            choice.number,
            out / "trials",
            seeds=seeds,
            measure=measure,
        )
        done.append(trial)
        progress(trial)
        if trial.score is None:
            raise optuna.TrialPruned(trial.error)
        return trial.score

    samplers = optuna.samplers
    sampler = samplers.GridSampler(grid, seed=seeds[0]) if grid else samplers.TPESampler(seed=seeds[0])
    search = optuna.create_study(direction="minimize" if less else "maximize", sampler=sampler)
    search.optimize(objective, n_trials=trials, timeout=60 * minutes)
    good = {trial.number: trial.score for trial in done if trial.score is not None}
    if not good:
        raise FedLDError(f"no trial finished; the first one failed: {done[0].error}")
    best = done[(min if less else max)(good, key=lambda number: good[number])]
    recommended = make_experiment(apply(settings, best.values))
    tuned = Tuned(
        command=command,
        hold_out=hold_out,
        primary=primary,
        seeds=list(seeds),
        experiment=recommended,
        best=best,
        trials=done,
    )
    write_atomically(out / "tune.json", json.dumps(tuned.to_json(), indent=1).encode())
    write_atomically(out / "tuned.toml", tuned.to_toml().encode())
    return tuned


def _try(
    settings: Settings,
    values: dict[str, Value],
    number: int,
    folder: Path,
    seeds: Sequence[int],
    measure: Measure,
) -> TuningTrial:
    """Run one choice with every seed; a run that diverges has no score."""
    start = time.perf_counter()
    scores: list[float] = []
    for seed in seeds:
        cell = Cell(
            label="trial",
            experiment=make_experiment(settings | {"seed": seed}),
            path=folder / f"{number:03d}-seed{seed}",
        )
        try:
            run_cell(cell, loop.quiet)
            scores.append(validation_score(read_run(cell.path), measure))
        except OtherSettings:
            raise
        except FedLDError as error:
            return TuningTrial(
                number=number,
                values=values,
                score=None,
                seconds=time.perf_counter() - start,
                error=str(error),
            )
    return TuningTrial(number=number, values=values, score=fmean(scores), seconds=time.perf_counter() - start)


def validation_score(run: Run, measure: Measure) -> float:
    """Average a run's measure over the last five evaluations; without a global model, the clients' own.

    A run without a value in its last evaluation, such as one that diverged, has no score.
    """
    series = list((run.scores(measure.name) or run.scores(measure.name, "personal")).values())
    if not series or not np.isfinite(series[-1]):
        raise FedLDError(f"there is no {measure.name} on the validation images in the last evaluation")
    return last_mean(finite_values(series))


def _suggest(choice: Any, name: str, span: SearchRange) -> Value:
    if span.values:
        value: Value = choice.suggest_categorical(name, span.values)
        return value
    if isinstance(span.low, int) and isinstance(span.high, int):
        return int(choice.suggest_int(name, span.low, span.high, log=span.log))
    return float(choice.suggest_float(name, span.low, span.high, step=span.step, log=span.log))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise FedLDError("tuning needs Optuna: pip install 'fedld[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what fails is ours to say, in a sentence
    return optuna
