"""Tuning on validation images held out from the clients' training data; the test set is never read."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedld.aggregation import Principal
from fedld.data import Federation
from fedld.engine import loop
from fedld.engine.experiment import Experiment, describe_objective, make_experiment
from fedld.engine.records import write_atomically
from fedld.engine.setup import Local
from fedld.errors import FedLDError, nearest
from fedld.registry import options_of
from fedld.study.grid import Cell, run_cell

Settings = dict[str, Any]


@dataclass(frozen=True)
class Dial:
    """One number to search: between two ends, or among given values."""

    low: float
    high: float
    step: float | None = None  # None: searched on a logarithmic scale
    values: tuple[float, ...] = ()


DIALS = {
    "lr": Dial(0.001, 0.3),
    "lam": Dial(0.001, 1.0),
    "components": Dial(0.2, 1.0, step=0.2),
    "mu": Dial(0.0001, 1.0),
}


@dataclass(frozen=True)
class Validation(Local):
    """This machine, with a part of every client's training images as the test set."""

    fraction: float = 0.2

    def federation(self, experiment: Experiment) -> Federation:
        """The federation without its test set."""
        return super().federation(experiment).hold_out(self.fraction, experiment.seed)


@dataclass(frozen=True)
class Trial:
    """One choice and its accuracy on the validation images, mean of the last five rounds and of the seeds."""

    number: int
    values: dict[str, float]
    accuracy: float | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Tuned:
    """The best choice and all others."""

    command: str
    fraction: float
    seeds: list[int]
    experiment: Experiment
    best: Trial
    trials: list[Trial]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"experiment": self.experiment.model_dump(mode="json", exclude_none=True)}

    def to_toml(self) -> str:
        """The recommended experiment."""
        found = ", ".join(f"{name} = {value:.4g}" for name, value in self.best.values.items())
        return (
            f"# Made by: {self.command}\n# Best of {len(self.trials)} trials on {self.fraction:.0%} of the "
            f"clients' training images: {found}\n"
            f"# Validation accuracy {self.best.accuracy:.4f}, seeds {self.seeds}\n"
            + self.experiment.to_toml()
        )


def dials_of(settings: Settings, only: Sequence[str] | None = None) -> dict[str, Dial]:
    """The numbers that the method has, or those of them that are asked for."""
    method = make_experiment(settings).make_method()
    has = {
        "lr": True,
        "lam": hasattr(method.objective, "lam"),
        "components": isinstance(method.rule, Principal),
        "mu": "mu" in options_of(method),
    }
    names = [name for name in DIALS if has[name]]
    for name in only or []:
        if name not in names:
            raise FedLDError(f"there is no '{name}' to tune in this method: {nearest(name, names)}")
    return {name: DIALS[name] for name in only or names}


def apply(settings: Settings, values: dict[str, float]) -> Settings:
    """Settings with the values put where they belong.

    >>> apply({"method": "fedld"}, {"lr": 0.1, "lam": 0.5})
    {'method': 'fedld', 'lr': 0.1, 'objective': {'name': 'marg-log', 'lam': 0.5}}
    """
    method, result = make_experiment(settings).make_method(), dict(settings)
    if "lr" in values:
        result["lr"] = values["lr"]
    if "lam" in values:
        result["objective"] = describe_objective(method.objective, lam=values["lam"])
    if "components" in values:
        options = {key: value for key, value in asdict(method.rule).items() if value is not None}
        result["rule"] = {"name": method.rule.name, **options, "components": values["components"]}
    if "mu" in values:
        part = settings["method"]
        result["method"] = {**({"name": part} if isinstance(part, str) else part), "mu": values["mu"]}
    return result


def tune(
    settings: Settings,
    out: Path,
    *,
    minutes: float,
    trials: int | None = None,
    seeds: Sequence[int] = (0,),
    fraction: float = 0.2,
    only: Sequence[str] | None = None,
    grid: dict[str, tuple[float, ...]] | None = None,
    resume: bool = False,
    command: str = "",
    progress: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Search until the minutes (or trials) are spent; write tune.json and tuned.toml.

    The first trial is the settings as they are, so the recommendation is never worse than them on the
    validation images. With a `grid`, the trials are all its combinations and nothing else. The search is
    seeded, so a resumed one asks the same questions again and finds the answers of its finished trials.
    """
    optuna = _optuna()
    dials, done = dials_of(settings, list(grid) if grid else only), []
    if (out / "trials").exists() and not resume:
        raise FedLDError(f"'{out}' already holds a search: choose another --out, or finish it with --resume")
    if grid:
        dials = {name: replace(dials[name], values=values) for name, values in grid.items()}

    def objective(choice: Any) -> float:
        asked = grid or choice.number
        values = {name: _suggest(choice, name, dial) for name, dial in dials.items()} if asked else {}
        trial = _try(apply(settings, values), values, choice.number, out / "trials", seeds, fraction)
        done.append(trial)
        progress(trial)
        if trial.accuracy is None:
            raise optuna.TrialPruned(trial.error)
        return trial.accuracy

    samplers = optuna.samplers
    sampler = samplers.GridSampler(grid, seed=seeds[0]) if grid else samplers.TPESampler(seed=seeds[0])
    search = optuna.create_study(direction="maximize", sampler=sampler)
    search.optimize(objective, n_trials=trials, timeout=60 * minutes)
    good = [trial for trial in done if trial.accuracy is not None]
    if not good:
        raise FedLDError(f"no trial finished; the first one failed: {done[0].error}")
    best = max(good, key=lambda trial: trial.accuracy or 0.0)
    recommended = make_experiment(apply(settings, best.values))
    tuned = Tuned(command, fraction, list(seeds), recommended, best, done)
    write_atomically(out / "tune.json", json.dumps(tuned.to_json(), indent=1).encode())
    write_atomically(out / "tuned.toml", tuned.to_toml().encode())
    return tuned


def _try(
    settings: Settings, values: dict[str, float], number: int, folder: Path, seeds: Sequence[int], part: float
) -> Trial:
    """One choice with every seed; what diverges has no accuracy."""
    start = time.perf_counter()
    accuracies: list[float] = []
    for seed in seeds:
        cell = Cell("trial", make_experiment(settings | {"seed": seed}), folder / f"{number:03d}-seed{seed}")
        try:
            summary = run_cell(cell, loop.quiet, Validation(part))
        except FedLDError as error:
            return Trial(number, values, None, time.perf_counter() - start, str(error))
        key = "last5_accuracy" if "last5_accuracy" in summary else "personal_last5_accuracy"
        accuracies.append(summary[key])
    return Trial(number, values, fmean(accuracies), time.perf_counter() - start)


def _suggest(choice: Any, name: str, dial: Dial) -> float:
    if dial.values:
        return float(choice.suggest_categorical(name, dial.values))
    return float(choice.suggest_float(name, dial.low, dial.high, step=dial.step, log=dial.step is None))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise FedLDError("tuning needs Optuna: pip install 'fedld[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
