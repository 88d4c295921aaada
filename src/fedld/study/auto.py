"""Which method to use: a search over methods and rates on held-out training images, within given minutes.

    1. Every candidate trains for a quarter of the rounds on one seed. A method whose best learning rate is
       the smallest or largest is tried beyond it. If time allows, the better half trains for half of them.
    2. The best candidate and the best FedAvg train for all rounds on other seeds, which gives an interval.
    3. The winner trains on everything. Where the interval does not exclude zero, the winner is FedAvg.

The test set is read once, after the last round of step 3. Finished runs are kept, so a search can be resumed.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedld.analysis.statistics import PairedDifference, paired_difference
from fedld.config.experiment import Experiment, make_experiment, read_toml
from fedld.config.presets import FINE_TUNE, read_preset
from fedld.config.resolve import make_measures
from fedld.errors import FedLDError
from fedld.paths import make_folder
from fedld.records.reader import read_run
from fedld.records.schema import FORMAT, Event
from fedld.records.tables import no_html
from fedld.records.writer import write_atomically
from fedld.study import formats
from fedld.study.grid import Cell, Deadline, OtherSettings, run_cell, run_grid
from fedld.study.measures import check_primary
from fedld.study.tune import HOLD_OUT, validation_score
from fedld.tasks.measure import Measure

CLOSED: Mapping[str, Mapping[str, Any]] = {
    "ridge": {"name": "ridge"},
    "lda": {"name": "lda"},
    "ridge, random units": {"name": "ridge", "features": "random:2048"},
}
TRAINED = ("fedavg", "scaffold", "fedld-measured", "fedld-drift")
BASELINE = "fedavg"
RATES = (0.003, 0.01, 0.03, 0.1)
PRETRAINED_RATES = (0.0003, 0.001, 0.003, 0.01)
"""Learning rates where pretrained blocks are trained too: larger ones destroy what they know."""
RECIPE = ("start", "steps", "buffers", "momentum", "local_steps", "average_models")
"""Settings of the preset `fine-tune` that every candidate of it shares; what the user gives goes first."""
RECIPE_METHODS = ("scaffold", "fedavgm")
RECIPE_RATES = (0.0003, 0.001, 0.003)
BEYOND = 2
"""So many more rates of a method are tried while its best one is the smallest or largest."""
LEAST_SEEDS, MOST_SEEDS = 3, 10
MARGIN = 1.2
"""How much longer than expected a run may take before the minutes are exceeded."""
BEGIN = 5.0
"""Seconds to begin and end the final training."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method with settings of its own, and its learning rate; a closed form has none."""

    family: str
    method: str
    settings: dict[str, Any]
    rate: float | None = None

    @property
    def closed(self) -> bool:
        """Whether one round solves it."""
        return self.rate is None

    @property
    def label(self) -> str:
        """Name in the table."""
        return self.family if self.closed else f"{self.family}, lr {self.rate:g}"

    def length(self, rounds: int) -> int:
        """Count the rounds that it needs of so many."""
        return 1 if self.closed else rounds

    def at(self, rate: float) -> "Candidate":
        """Return the same method with another learning rate."""
        return replace(self, rate=rate, settings={**self.settings, "lr": rate})


@dataclass(frozen=True, kw_only=True)
class AutoTrial:
    """A candidate's run on held-out images: its score by seed, None where it failed, and its cost."""

    label: str
    rounds: int
    scores: dict[int, float | None]
    seconds: float
    megabytes: float

    @property
    def mean(self) -> float:
        """Mean score over seeds; minus infinity where a run failed."""
        scores = [score for score in self.scores.values() if score is not None]
        return fmean(scores) if scores and len(scores) == len(self.scores) else -math.inf


@dataclass(frozen=True, kw_only=True)
class AutoResult:
    """What was tried and what came of it."""

    chosen: str
    reason: str
    primary: str
    difference: PairedDifference | None
    trials: list[AutoTrial]
    experiment: Experiment = field(repr=False)
    path: Path = field(repr=False)
    measures: dict[str, float | None]  # of the final model on the test set

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "format": FORMAT,
            "chosen": self.chosen,
            "reason": self.reason,
            "primary": self.primary,
            "difference": None if self.difference is None else asdict(self.difference),
            "trials": [asdict(trial) for trial in self.trials],
            "experiment": self.experiment.model_dump(mode="json", exclude_none=True),
            "measures": self.measures,
        }

    def to_markdown(self) -> str:
        """The reason, and a table of everything that was tried."""
        head = ["tried", "rounds", "seeds", f"{self.primary} on held-out images", "s", "MB"]
        rows = [
            [
                trial.label,
                str(trial.rounds),
                str(len(trial.scores)),
                "failed" if math.isinf(trial.mean) else f"{trial.mean:.4f}",
                f"{trial.seconds:.1f}",
                f"{trial.megabytes:.1f}",
            ]
            for trial in self.trials
        ]
        return no_html(f"{self.reason}\n\n{formats.markdown([head, *rows])}\n")


def candidates(settings: Mapping[str, Any]) -> list[Candidate]:
    """Give what is tried: closed forms on a frozen trunk, and every trained method at some rates.

    Where pretrained blocks are trained, the closed forms are those of the network as it is given, and the
    preset `fine-tune` is tried too.
    """
    experiment = make_experiment({**settings, "method": BASELINE})
    pretrained = experiment.weights is not None and experiment.train != "head"
    linear = experiment.head == "linear" and experiment.augment == "none"
    tried = []
    if linear and (pretrained or experiment.train == "head"):
        frozen = {} if experiment.train == "head" else {"train": "head", "start": "seed", "steps": "plain"}
        for label, method in CLOSED.items():
            settings_of_it = {**frozen, "method": dict(method)}
            tried.append(Candidate(family=label, method=method["name"], settings=settings_of_it))
    given = (settings["lr"],) if "lr" in settings else None
    for name in TRAINED:
        trained = Candidate(family=name, method=name, settings={"method": name})
        tried += [trained.at(rate) for rate in given or (PRETRAINED_RATES if pretrained else RATES)]
    recipe = read_preset(FINE_TUNE)
    if pretrained and _follows(recipe, experiment, settings):
        for name in RECIPE_METHODS:
            how = {key: recipe[key] for key in RECIPE if key in recipe and key not in settings}
            how["method"] = {"name": name, **recipe[name]}
            trained = Candidate(family=f"{name}, centred", method=name, settings=how)
            tried += [trained.at(rate) for rate in given or RECIPE_RATES]
    return tried


def _follows(recipe: Mapping[str, Any], experiment: Experiment, settings: Mapping[str, Any]) -> bool:
    """Say whether the user's settings leave room for the preset's fine-tuning."""
    stays = all(settings.get(key, recipe[key]) == recipe[key] for key in ("start", "steps", "buffers"))
    sgd = experiment.optimiser in ("sgd", "nesterov") and experiment.local_epochs == 1
    classes = experiment.task in ("auto", "classification") and experiment.head == "linear"
    return stays and sgd and classes and experiment.augment == "none" and experiment.dp is None


def auto(
    settings: Mapping[str, Any],
    out: Path,
    *,
    minutes: float,
    primary: str | None = None,
    jobs: int | None = None,
    resume: bool = False,
    progress: Callable[[Event], None] = lambda event: None,
) -> AutoResult:
    """Find the method to use and train it.

    Args:
        settings: an experiment's settings without a method; with `lr` that rate is the only one tried.
        out: folder of the runs, of auto.json and auto.md; the final run is in its folder `final`.
        minutes: time to spend.
        primary: the measure that decides; the task's first one by default.
        jobs: runs at the same time; one per core by default.
        resume: continue the search in `out`.
        progress: told of every round.

    Returns:
        The choice, the reason for it and everything that was tried.

    Raises:
        FedLDError: the minutes are too few for one trial of each candidate.
    """
    if "method" in settings:
        raise FedLDError("auto chooses the method: leave it out")
    if not minutes > 0:
        raise FedLDError(f"minutes is the time to spend, above 0, not {minutes!r:.80}")
    if (out / "trials").exists() and not resume:
        raise FedLDError(f"'{out}' already holds a search: choose another --out, or finish it with --resume")
    return _Search(dict(settings), out, minutes, primary, jobs=jobs, progress=progress).go()


class _Search:
    """A search under way."""

    def __init__(
        self,
        settings: dict[str, Any],
        out: Path,
        minutes: float,
        primary: str | None,
        jobs: int | None,
        progress: Callable[[Event], None],
    ) -> None:
        self.end = time.time() + 60 * minutes
        self.out, self.minutes, self.progress = out, minutes, progress
        self.settings = {key: value for key, value in settings.items() if key != "hold_out"}
        self.hold_out = settings.get("hold_out", HOLD_OUT)
        self.jobs = jobs if jobs is not None else os.cpu_count() or 1
        self.candidates = candidates(self.settings)
        self.experiment = make_experiment(self.settings)
        measures = make_measures(self.experiment)
        self.measure: Measure = measures[check_primary(primary, measures)]
        self.trials: list[AutoTrial] = []
        make_folder(out / "trials")

    def go(self) -> AutoResult:
        """Search, confirm, train."""
        rounds = self.experiment.rounds
        short, middle = max(1, math.ceil(rounds / 4)), max(1, math.ceil(rounds / 2))
        first = next(c for c in self.candidates if c.method == BASELINE)
        others = [c for c in self.candidates if c.method != BASELINE]
        trial = self._tried([first, *others[::-1][: max(self.jobs - 1, 0)]], short)[first.label]
        if None in trial.scores.values() and self._over(0):
            raise FedLDError(
                f"{self.minutes:g} minutes are too few for the first of {len(self.candidates)} trials: "
                "it goes on with more minutes and --resume"
            )
        self._check_minutes(trial, short)
        scores = self._tried(self.candidates, short, keep=self._after_trials(trial))
        scores |= self._beyond(scores, short, keep=self._after_trials(trial))
        kept = self._better(self.candidates, scores, len(self.candidates) // 2)
        if self._expected(kept, scores, middle, 1) < self._left() - self._reserve(kept, scores):
            scores |= self._finished(self._tried(kept, middle, keep=self._reserve(kept, scores)))
        best = self._better([c for c in kept if c.method != BASELINE], scores, 1)[:1]
        base = self._better([c for c in kept if c.method == BASELINE], scores, 1)[0]
        if not best:
            return self._train(base, None, f"no method but {base.label} finished its trials")
        return self._decide(best[0], base, scores)

    def _beyond(self, scores: Mapping[str, AutoTrial], rounds: int, keep: float) -> dict[str, AutoTrial]:
        """Try further rates of methods whose best rate is the smallest or largest one, as time allows."""
        more: dict[str, AutoTrial] = {}
        for _ in range(0 if "lr" in self.settings else BEYOND):
            further = self._next_rates({**scores, **more})
            like = [c for c in self.candidates if c.family in {f.family for f in further}]
            longest = max((self._expected([c], scores, rounds, 1) for c in like), default=0.0)
            if not further or longest * len(further) > self._left() - keep:
                break
            self.candidates = [*self.candidates, *further]
            more |= self._tried(further, rounds, keep=keep)
        return more

    def _next_rates(self, scores: Mapping[str, AutoTrial]) -> list[Candidate]:
        """Give every method whose best rate is an outermost one the next rate outwards."""
        families: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            if not candidate.closed:
                families.setdefault(candidate.family, []).append(candidate)
        further = []
        for family in families.values():
            rates = sorted(c.rate for c in family if c.rate is not None)
            best = self._ranked(family, scores)[:1]
            if best and best[0].rate == rates[0]:
                further.append(best[0].at(float(f"{rates[0] / 3:.1g}")))
            elif best and best[0].rate == rates[-1]:
                further.append(best[0].at(float(f"{rates[-1] * 3:.1g}")))
        return further

    def _decide(self, best: Candidate, base: Candidate, scores: Mapping[str, AutoTrial]) -> AutoResult:
        """Train both on all rounds with several seeds, and choose."""
        pair, rounds = [best, base], self.experiment.rounds
        seconds_per_seed = self._expected(pair, scores, rounds, 1)
        final = self._expected([base], scores, rounds, 1) * self.jobs
        seeds = int(max(LEAST_SEEDS, min(MOST_SEEDS, (self._left() - final) // max(seconds_per_seed, 1e-9))))
        fresh = range(1, 1 + seeds)  # seed 0 has chosen them
        trials = self._tried(pair, rounds, fresh, keep=final / max(self.jobs, 1))
        ours, theirs = (list(trials[c.label].scores.values()) for c in pair)
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
        if len(pairs) < 2 and self._over(final / max(self.jobs, 1)):
            why = f"no time was left to compare {best.label} with {base.label}, so {base.label} is used"
            return self._train(base, None, why)
        if len(pairs) < 2:
            return self._train(base, None, f"{best.label} failed with all rounds, so {base.label} is used")
        sign = -1.0 if self.measure.better == "less" else 1.0
        difference = paired_difference([sign * a for a, _ in pairs], [sign * b for _, b in pairs])
        low, high = difference.interval or (-math.inf, math.inf)
        between = f"[95 %: {low:+.4f} to {high:+.4f}], {len(pairs)} seeds"
        result = f"{self.measure.name} {difference.mean:+.4f} {between}"
        if low > 0:
            return self._train(best, difference, f"{best.label} is better than {base.label}: {result}")
        best_other = f"the best other one is {best.label}: {result}"
        why = f"no method is significantly better than {base.label}; {best_other}"
        return self._train(base, difference, why)

    def _train(self, chosen: Candidate, difference: PairedDifference | None, reason: str) -> AutoResult:
        """Train the chosen candidate on everything; only now the test set is read."""
        rounds = chosen.length(self.experiment.rounds)
        fitting = self._fitting(chosen, rounds)
        if fitting < rounds:
            reason += f"; the time allowed {fitting} of {rounds} rounds for the final model"
        lengths = {"rounds": fitting, "eval_every": fitting}
        experiment = make_experiment({**self.settings, **chosen.settings, **lengths})
        deadline = Deadline(self.end, ends=True)
        run_cell(
            Cell(label=chosen.label, experiment=experiment, path=self.out / "final"),
            self.progress,
            [deadline],
        )
        run = read_run(self.out / "final")
        if (done := len(run.rounds.lines)) < fitting:
            reason += f"; stopped after round {done}, as the time was over: the test set was not read"
        last = {
            name: values[max(values)] for name in make_measures(experiment) if (values := run.scores(name))
        }
        result = AutoResult(
            chosen=chosen.label,
            reason=reason,
            primary=self.measure.name,
            difference=difference,
            trials=self.trials,
            experiment=experiment,
            path=self.out / "final",
            measures=dict(last),
        )
        write_atomically(self.out / "auto.json", json.dumps(result.to_json(), indent=1, default=str).encode())
        write_atomically(self.out / "auto.md", result.to_markdown().encode())
        return result

    def _fitting(self, chosen: Candidate, rounds: int) -> int:
        """So many rounds of the final training are over in time; as many as before where it was begun."""
        file = self.out / "final" / "config.toml"
        if file.exists():
            return make_experiment(read_toml(file), self.experiment.own).rounds
        trials = [trial for trial in self.trials if trial.label == chosen.label and trial.seconds]
        a_round = max((trial.seconds / trial.rounds for trial in trials), default=0.0)
        if not a_round:
            return rounds
        return int(max(1, min(rounds, (self._left() - BEGIN) / (MARGIN * a_round))))

    def _tried(
        self, chosen: Sequence[Candidate], rounds: int, seeds: Sequence[int] = (0,), keep: float = 0.0
    ) -> dict[str, AutoTrial]:
        """Run candidates on held-out images until `keep` seconds are left; what is finished is read."""
        until = self.end - keep
        cells = {(c.label, seed): self._cell(c, rounds, seed, until) for c in chosen for seed in seeds}
        try:
            run_grid(list(cells.values()), jobs=self.jobs, progress=self.progress)
        except OtherSettings:
            raise
        except FedLDError:  # all failed
            if not self._over(keep) and time.time() < until:
                raise
        trials = {}
        for candidate in chosen:
            by_seed = {seed: cells[candidate.label, seed] for seed in seeds}
            trials[candidate.label] = self._trial(candidate.label, candidate.length(rounds), by_seed)
        every = [*self.trials, *trials.values()]
        latest = {(trial.label, trial.rounds, tuple(trial.scores)): trial for trial in every}
        self.trials = list(latest.values())
        return trials

    def _finished(self, trials: Mapping[str, AutoTrial]) -> dict[str, AutoTrial]:
        return {label: trial for label, trial in trials.items() if not math.isinf(trial.mean)}

    def _over(self, keep: float) -> bool:
        """Say whether the time but for `keep` seconds is over, or will be before another round is."""
        slowest = max((trial.seconds / trial.rounds for trial in self.trials), default=0.0)
        return self._left() - keep <= MARGIN * slowest

    def _cell(self, candidate: Candidate, rounds: int, seed: int, until: float) -> Cell:
        rounds = candidate.length(rounds)
        run_settings = {"hold_out": self.hold_out, "rounds": rounds, "seed": seed, "workers": 0}
        settings = {**self.settings, **candidate.settings, **run_settings}
        name = re.sub(r"[^\w.-]+", "-", candidate.label)
        folder = self.out / "trials" / f"{name}-rounds{rounds}-seed{seed}"
        return Cell(label=candidate.label, experiment=make_experiment(settings), path=folder, until=until)

    def _trial(self, label: str, rounds: int, cells: Mapping[int, Cell]) -> AutoTrial:
        scores: dict[int, float | None] = {}
        seconds, sent = [], []
        for seed, cell in cells.items():
            scores[seed] = None
            if not (cell.path / "config.toml").exists():
                continue  # no time was left to begin it
            run = read_run(cell.path)
            if (cell.path / "summary.json").exists():
                with suppress(FedLDError):
                    scores[seed] = validation_score(run, self.measure)
            seconds.append(sum(run.series("seconds").values()))
            sent.append(sum(run.series("bytes_up").values()) + sum(run.series("bytes_down").values()))
        if not seconds:
            return AutoTrial(label=label, rounds=rounds, scores=scores, seconds=0.0, megabytes=0.0)
        return AutoTrial(
            label=label, rounds=rounds, scores=scores, seconds=fmean(seconds), megabytes=fmean(sent) / 1e6
        )

    def _better(
        self, chosen: Sequence[Candidate], scores: Mapping[str, AutoTrial], count: int
    ) -> list[Candidate]:
        """The best candidates, and in any case the best one of FedAvg and the best other one."""
        ranked = self._ranked(chosen, scores)
        kept = ranked[:count]
        for is_base in (True, False):
            alike = [c for c in ranked if (c.method == BASELINE) is is_base]
            if alike and alike[0] not in kept:
                kept.append(alike[0])
        return kept

    def _ranked(self, chosen: Sequence[Candidate], scores: Mapping[str, AutoTrial]) -> list[Candidate]:
        """Candidates that finished their trial, the best one first."""
        sign = -1 if self.measure.better == "less" else 1
        fine = [c for c in chosen if c.label in scores and not math.isinf(scores[c.label].mean)]
        return sorted(fine, key=lambda c: -sign * scores[c.label].mean)

    def _expected(
        self, chosen: Sequence[Candidate], scores: Mapping[str, AutoTrial], rounds: int, seeds: int
    ) -> float:
        """Seconds that some candidates are expected to take, side by side."""
        each = [
            scores[c.label].seconds / scores[c.label].rounds * c.length(rounds)
            for c in chosen
            if c.label in scores
        ]
        return MARGIN * seeds * sum(each) / max(self.jobs, 1)

    def _reserve(self, kept: Sequence[Candidate], scores: Mapping[str, AutoTrial]) -> float:
        """Seconds to keep for two candidates with all rounds and the final training."""
        longest = max(kept, key=lambda c: scores[c.label].seconds)
        rounds = self.experiment.rounds
        return self._expected([longest] * 2, scores, rounds, LEAST_SEEDS) + self._expected(
            [longest] * max(self.jobs, 1), scores, rounds, 1
        )

    def _check_minutes(self, trial: AutoTrial, rounds: int) -> None:
        """Refuse minutes in which not every candidate can be tried, two compared and one trained."""
        a_round = trial.seconds / rounds
        trained = sum(not c.closed for c in self.candidates)
        work = a_round * rounds * trained / max(self.jobs, 1)
        least = math.ceil(10 * (MARGIN * work + self._after_trials(trial)) / 60) / 10
        if least > self.minutes:
            raise FedLDError(
                f"{self.minutes:g} minutes are too few for one trial of each of {len(self.candidates)} "
                f"candidates: at least {least:g} are needed"
            )

    def _after_trials(self, trial: AutoTrial) -> float:
        """Seconds to keep for the comparison and the final training, by the speed of a trial."""
        a_round, whole = trial.seconds / trial.rounds, self.experiment.rounds
        return BEGIN + MARGIN * a_round * (whole * 2 * LEAST_SEEDS / max(self.jobs, 1) + whole)

    def _left(self) -> float:
        """Seconds that are left."""
        return self.end - time.time()
