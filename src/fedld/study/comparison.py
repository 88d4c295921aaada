"""One comparison, computed once for all readers: ranks, differences, their intervals and explanations.

Methods are compared over the seeds they share with the baseline: same partition, same initial weights. In a
cross-validation they are compared over folds, each the mean over its seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean, stdev
from typing import Any

from fedld.analysis.statistics import PairedDifference, holm, mean_interval, paired_difference
from fedld.methods import METHODS
from fedld.records.reader import Evaluated, Run, by_label
from fedld.records.schema import FORMAT
from fedld.records.tables import no_html
from fedld.study import formats
from fedld.study.measures import (
    DEFAULT_TARGET,
    Reached,
    Target,
    check_primary,
    finite_scores,
    mean_of,
    measures_of,
    never_predicted,
    reached,
    value_of,
)
from fedld.study.reasons import Account, Explanation, account_of, explain
from fedld.study.verdict import headline, warnings
from fedld.tasks.measure import Measure, last_mean

LEVEL = 0.05
CORRECTED = "corrected resampled t test (Nadeau and Bengio, 2003)"
WHY = (
    "The server's step beside the plain average's (length and cosine, mean over rounds and seeds), and the "
    "terms of the loss in the last decomposed round (Eq. 2; run with --decompose to have them)."
)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One method: every measure of its global model by seed, and its paired difference to the baseline.

    In a cross-validation the keys are folds instead of seeds.
    """

    label: str
    seeds: list[int]
    values: dict[str, dict[int, float]]  # measure, seed; as they are shown
    last5: dict[int, float]
    best: dict[int, float]
    personal: dict[int, float]  # the personalised models, apart
    account: Account
    never: dict[str, int]  # class that is never predicted: in how many seeds
    megabytes: float
    seconds: float
    differences: dict[str, PairedDifference] = field(default_factory=dict)  # measure: to the baseline
    difference: PairedDifference | None = None  # that of the primary measure
    p_value: float | None = None  # of the primary measure, Holm's over all methods of the comparison
    measures: tuple[str, ...] = ()  # all of them, the first one decides unless another is named
    reference: bool = False  # a bound such as `central`: it is compared, but cannot win
    same_as_fedavg: bool = False  # FedBN on a network that has no BatchNorm
    reached: Reached | None = None  # when the target accuracy was reached
    folds: int | None = None  # of a cross-validation

    def interval(self, measure: str) -> tuple[float, float] | None:
        """Compute the 95 % interval of the mean over folds (Nadeau and Bengio); None without folds."""
        values = list(self.values.get(measure, {}).values())
        return mean_interval(values, folds=self.folds) if self.folds and values else None

    def mean(self, measure: str) -> float | None:
        """Average a measure over seeds."""
        return mean_of(list(self.values.get(measure, {}).values()))

    @property
    def significant(self) -> bool | None:
        """Whether Holm's p is below 5 %; None where it cannot be tested."""
        return None if self.p_value is None else self.p_value < LEVEL

    def to_json(self) -> dict[str, Any]:
        """Give plain data; `final`, `last5`, `best` and `personal` are of the first measure, by seed."""
        d = self.difference
        first, *others = self.measures
        lists = {"final": self.values.get(first, {}), "last5": self.last5, "best": self.best}
        lists |= {name: self.values.get(name, {}) for name in others}
        lists["personal"] = self.personal
        row: dict[str, Any] = {"label": self.label, "seeds": self.seeds, "reference": self.reference}
        for name, by_seed in lists.items():
            if name in row:
                continue  # a user's measure with the name of another field: it is among `values`
            values = [by_seed[s] for s in self.seeds if s in by_seed] or None
            row |= {name: values, f"{name}_mean": fmean(values) if values else None}
            row[f"{name}_sd"] = stdev(values) if values and len(values) > 1 else None
        if self.folds:
            cross = {"folds": self.folds, "intervals": {name: self.interval(name) for name in self.values}}
            row |= cross
        return row | {
            "values": {name: list(by_seed.values()) for name, by_seed in self.values.items()},
            "difference": d.mean if d else None,
            "interval": d.interval if d else None,
            "effect_size": d.effect_size if d else None,
            "p_value": self.p_value,
            "differences": {
                name: {"mean": difference.mean, "interval": difference.interval}
                for name, difference in self.differences.items()
            },
            "never_predicted": self.never,
            "target": None if self.reached is None else self.reached.to_json(),
            "megabytes": self.megabytes,
            "seconds": self.seconds,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods of a study."""

    title: str
    baseline: str
    primary: str
    round: int
    measures: dict[str, Measure]  # those of the task and those that users added, by name
    standings: list[Standing]  # as they were named
    level: float | None = None  # the target accuracy, %
    runs: tuple[Run, ...] = field(repr=False, default=())
    failed: tuple[Run, ...] = field(repr=False, default=())  # they are in no number above

    @property
    def folds(self) -> int | None:
        """How many folds the cross-validation has; None without one."""
        return next((standing.folds for standing in self.standings), None)

    @property
    def unit(self) -> str:
        """What methods are paired by: seed or fold."""
        return "fold" if self.folds else "seed"

    @property
    def first(self) -> Measure:
        """The measure of the last-five, best and personalised values."""
        return next(iter(self.measures.values()))

    @property
    def primary_measure(self) -> Measure:
        """The primary measure."""
        return self.measures[self.primary]

    @cached_property
    def ranked(self) -> list[Standing]:
        """Best first, references last; methods without a global model are left out."""
        served = [s for s in self.standings if self.primary in s.values]
        return sorted(served, key=lambda s: (s.reference, -self._lead(s)))

    @property
    def winner(self) -> Standing | None:
        """The federated method with the best primary measure over the seeds it shares with the baseline."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def rival(self) -> str | None:
        """Whom the winner is compared with: the baseline; where that won, the next best."""
        if self.winner is None:
            return None
        if self.winner.label != self.baseline:
            return self.baseline
        return next((s.label for s in self.ranked if s.difference), None)

    @property
    def decisive(self) -> Standing | None:
        """The paired test that decides: the winner's, or the rival's where the baseline won."""
        if self.winner is None:
            return None
        label = self.rival if self.winner.label == self.baseline else self.winner.label
        return next((s for s in self.ranked if s.label == label and s.difference), None)

    @cached_property
    def explanation(self) -> Explanation | None:
        """Which loss terms differ between winner and rival."""
        if self.winner is None or self.rival is None:
            return None
        return explain(self.runs, self.winner.label, self.rival)

    def standing(self, label: str) -> Standing:
        """Find the standing of a method."""
        return next(s for s in self.standings if s.label == label)

    @property
    def verdict(self) -> str:
        """What happened to every method, in one sentence."""
        return headline(self)

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the verdict."""
        return warnings(self)

    @property
    def table(self) -> list[list[str]]:
        """Head and rows as text; columns that hold nothing are left out."""
        head = ["method", *(name for name, _ in self._columns())]
        rows = [head, *([s.label, *(cell(s) for _, cell in self._columns())] for s in self.standings)]
        used = [k for k in range(len(head)) if any(row[k] not in ("", "-") for row in rows[1:])]
        return [[row[k] for k in used] for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Give plain data: the table, the verdict and the loss terms behind it."""
        explanation = self.explanation
        return {
            "format": FORMAT,
            "title": self.title,
            "baseline": self.baseline,
            "primary": self.primary,
            "measures": [measure.to_json() for measure in self.measures.values()],
            "round": self.round,
            **({"folds": self.folds, "test": CORRECTED} if self.folds else {}),
            "target": self.level,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "rows": [standing.to_json() for standing in self.standings],
            "causes": [standing.account.to_json() for standing in self.standings],
            "explanation": None
            if explanation is None
            else {"round": explanation.round, "terms": explanation.terms},
        }

    def to_markdown(self) -> str:
        """Write verdict, warnings, table and accounts under the title."""
        warnings = "".join(f"- {line}\n" for line in self.warnings)
        table = formats.markdown(self.table) + (f"\n{self.method_note}\n" if self.folds else "")
        return no_html(f"{self.title}\n\n{self.verdict}.\n\n{warnings}\n{table}\n{self.why()}")

    @property
    def method_note(self) -> str:
        """How the numbers of a cross-validation are made, in two sentences; empty without one."""
        if not self.folds:
            return ""
        return (
            f"{self.folds}-fold cross-validation: every image is tested once, mean ± standard deviation over "
            f"folds. Intervals and p values: {CORRECTED}."
        )

    def to_latex(self, comment: str = "", caption: str = "") -> str:
        """Write the table as a tabular; with a caption in a table environment."""
        comments = "\n".join(filter(None, (self.title, self.method_note, comment)))
        return formats.latex(self.table, comments, caption)

    def to_csv(self) -> str:
        """Write one row per method, seed (or fold) and measure, for own plots and tests."""
        return formats.comma_separated([["method", self.unit, "measure", "value"], *self.values()])

    def values(self) -> list[list[object]]:
        """List method, seed, measure and value, row by row."""
        rows: list[list[object]] = []
        for s in self.standings:
            name = self.first.name
            series = s.values | {f"last5_{name}": s.last5, f"best_{name}": s.best, "personal": s.personal}
            rows += [[s.label, seed, name, v] for name, by in series.items() for seed, v in by.items()]
            if s.reached is not None:
                rows += [[s.label, "all", f"target_{name}", v] for name, v in s.reached.to_json().items()]
        return rows

    def why(self) -> str:
        """Tabulate the accounts, with a legend."""
        rows = [["why", *Account.COLUMNS], *([s.label, *s.account.cells()] for s in self.standings)]
        return f"\n{WHY}\n\n{formats.markdown(rows)}\n"

    def _columns(self) -> list[tuple[str, Any]]:
        """List headings with the functions that make their cells; the primary measure comes first."""
        others = [m for m, measure in self.measures.items() if m != self.primary and not measure.minor]
        unit, digits = f", {self.first.unit}" if self.first.unit else "", self.first.digits
        return [
            (self.primary_measure.heading, lambda s: self._values(s, self.primary)),
            *([("95 % interval", self._interval)] if self.folds else []),
            (f"minus {self.baseline} [95 %]", lambda s: _difference(s, self.primary_measure.digits)),
            ("p (Holm)", lambda s: "" if s.p_value is None else f"{s.p_value:.3f}"),
            ("effect", lambda s: _effect(s.difference)),
            *((self.measures[m].heading, lambda s, m=m: self._values(s, m)) for m in others),
            (f"last 5{unit}", lambda s: formats.spread(list(s.last5.values()), digits)),
            (f"best{unit}", lambda s: formats.spread(list(s.best.values()), digits)),
            (f"personalised{unit}", lambda s: formats.spread(list(s.personal.values()), digits)),
            *self._target_columns(),
            (f"{self.unit}s", self._seeds),
            ("MB", lambda s: f"{s.megabytes:.1f}"),
            ("s", lambda s: f"{s.seconds:.0f}"),
        ]

    def _target_columns(self) -> list[tuple[str, Any]]:
        """List the columns on reaching the target and its cost; none without a target."""
        if self.level is None:
            return []
        return [
            (f"rounds to {self.level:.1f} %", lambda s: _reached(s, lambda r: f"{r.round}")),
            ("MB to it", lambda s: "" if s.reached is None else f"{s.reached.megabytes:.1f}"),
            ("s to it", lambda s: "" if s.reached is None else f"{s.reached.seconds:.1f}"),
        ]

    def _values(self, standing: Standing, measure: str) -> str:
        values = list(standing.values.get(measure, {}).values())
        return formats.spread(values, self.measures[measure].digits)

    def _interval(self, standing: Standing) -> str:
        interval, digits = standing.interval(self.primary), self.primary_measure.digits
        return "" if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"

    def _seeds(self, standing: Standing) -> str:
        """Count the seeds or folds behind a row, where runs are missing; the warnings say why."""
        if self.folds:
            return f"{len(standing.seeds)} of {self.folds}"
        missing = sum(run.label == standing.label for run in self.failed)
        return f"{len(standing.seeds)} of {len(standing.seeds) + missing}" if missing else ""

    def _lead(self, standing: Standing) -> float:
        """Give the paired difference that methods are ranked by; means over other seeds do not compare."""
        if standing.difference is not None:
            return self.primary_measure.sign * standing.difference.mean
        return 0.0 if standing.label == self.baseline else float("-inf")


def compare_runs(
    title: str,
    runs: Sequence[Run],
    baseline: str | None = None,
    primary: str | None = None,
    target: str = DEFAULT_TARGET,
) -> Comparison:
    """Compare the methods of some runs on the same data; the baseline is FedAvg, else the first method."""
    measures = measures_of(runs)
    primary = check_primary(primary, measures)
    at, compared = _comparable([run for run in runs if not run.failure])
    standings = [
        _standing(label, method_runs, at, measures) for label, method_runs in by_label(compared).items()
    ]
    labels = [s.label for s in standings if primary in s.values] or [s.label for s in standings]
    if baseline not in labels:
        baseline = "fedavg" if "fedavg" in labels else next(iter(labels), "")
    final = next((s.mean("accuracy") for s in standings if s.label == baseline), None)
    level = Target.parse(target).level(final) if "accuracy" in measures else None
    if level is not None:
        standings = [_to_target(s, compared, measures["accuracy"], level, at=at) for s in standings]
    return Comparison(
        title=title,
        baseline=baseline,
        primary=primary,
        round=at,
        measures=measures,
        standings=with_differences(standings, baseline, primary),
        level=level,
        runs=tuple(compared),
        failed=tuple(run for run in runs if run.failure),
    )


def _to_target(standing: Standing, runs: Sequence[Run], accuracy: Measure, level: float, at: int) -> Standing:
    """Add when a method with a global model reached the target."""
    method_runs = [run for run in runs if run.label == standing.label]
    return (
        replace(standing, reached=reached(method_runs, accuracy, level, at)) if standing.values else standing
    )


def with_differences(standings: list[Standing], baseline: str, primary: str) -> list[Standing]:
    """Add paired differences to the baseline in every measure, and Holm's p values of the primary one.

    Args:
        standings: all methods of a comparison, with their values by seed or fold.
        baseline: label of the method that the others are compared with.
        primary: name of the measure that decides; p values are corrected for all methods.

    Returns:
        The same methods with their differences; unchanged where the baseline is missing.
    """
    base = next((s for s in standings if s.label == baseline), None)
    if base is None:
        return standings
    differences: dict[str, dict[str, PairedDifference]] = {}
    for standing in standings:
        differences[standing.label] = {}
        for measure, values in standing.values.items():
            seeds = sorted(values.keys() & base.values.get(measure, {}).keys())
            if standing is not base and seeds:
                ours, theirs = [values[s] for s in seeds], [base.values[measure][s] for s in seeds]
                test = paired_difference(ours, theirs, folds=base.folds)
                differences[standing.label][measure] = test
    tests = {label: by_measure[primary] for label, by_measure in differences.items() if primary in by_measure}
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    return [
        replace(
            s, differences=differences[s.label], difference=tests.get(s.label), p_value=adjusted.get(s.label)
        )
        for s in standings
    ]


def _comparable(runs: Sequence[Run]) -> tuple[int, list[Run]]:
    """Choose the finished runs; with fewer than two finished methods, all up to their last shared round."""
    finished = [run for run in runs if run.finished and run.rounds.lines]
    if len({run.label for run in finished}) < min(2, len({run.label for run in runs})):
        finished = [run for run in runs if any("test" in line for line in run.rounds.lines)]
    last = [max(line["round"] for line in run.rounds.lines) for run in finished]
    return min(last, default=0), finished


def _standing(label: str, runs: Sequence[Run], at: int, measures: Mapping[str, Measure]) -> Standing:
    values = {name: _paired(runs, partial(_value, measure, at)) for name, measure in measures.items()}
    first = next(iter(measures.values()))
    classes = [name for run in runs for name in never_predicted(run)]
    sent = [sum(run.series("bytes_up").values()) + sum(run.series("bytes_down").values()) for run in runs]
    return Standing(
        label=label,
        seeds=sorted({run.pair for run in runs}),
        values={name: by_seed for name, by_seed in values.items() if by_seed},
        last5=_paired(runs, lambda run: _over(run, first, at, "test", reduce=last_mean)),
        best=_paired(runs, lambda run: _over(run, first, at, "test", reduce=first.best)),
        personal=_paired(
            runs, lambda run: _over(run, first, at, "personal", reduce=lambda series: series[-1])
        ),
        account=account_of(label, runs),
        never={name: classes.count(name) for name in dict.fromkeys(classes)},
        megabytes=(mean_of(sent) or 0.0) / 1e6,
        seconds=mean_of([sum(run.series("seconds").values()) for run in runs]) or 0.0,
        measures=tuple(measures),
        reference=_is_reference(runs[0]),
        same_as_fedavg=any(_keeps_nothing(run) for run in runs),
        folds=runs[0].folds,
    )


def _paired(runs: Sequence[Run], value: Callable[[Run], float | None]) -> dict[int, float]:
    """Collect a number of runs by seed, or by fold as the mean over seeds; runs without it are left out."""
    numbers_by_pair: dict[int, list[float]] = {}
    for run in runs:
        number = value(run)
        if number is not None:
            numbers_by_pair.setdefault(run.pair, []).append(number)
    return {pair: fmean(numbers) for pair, numbers in numbers_by_pair.items()}


def _value(measure: Measure, at: int, run: Run) -> float | None:
    return value_of(run, measure, at)


def _over(
    run: Run, measure: Measure, at: int, of: Evaluated, reduce: Callable[[list[float]], float]
) -> float | None:
    """Reduce a run's curve of a measure to one number; None without a curve."""
    series = list(finite_scores(run, measure, at, of).values())
    return reduce(series) if series else None


def _is_reference(run: Run) -> bool:
    """Tell whether the run's method is a bound and not a way to train a federation."""
    return run.method in METHODS and METHODS[run.method].card.paper == "reference"


def _keeps_nothing(run: Run) -> bool:
    """Tell whether FedBN ran on a network without BatchNorm, so that nothing stayed with the clients."""
    return run.method == "fedbn" and run.summary is not None and run.summary.get("private_parameters") == 0


def _difference(standing: Standing, digits: int) -> str:
    d = standing.difference
    if d is None:
        return ""
    form = f"+.{digits}f"
    return f"{d.mean:{form}}" + (f" [{d.interval[0]:{form}}, {d.interval[1]:{form}}]" if d.interval else "")


def _reached(standing: Standing, cell: Callable[[Reached], str]) -> str:
    if not standing.values:
        return ""
    return "not reached" if standing.reached is None else cell(standing.reached)


def _effect(difference: PairedDifference | None) -> str:
    size = difference.effect_size if difference else None
    return "" if size is None else f"{size:+.1f}"
