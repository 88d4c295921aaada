"""Evidence for and against a lead: loss terms, the server's step, signs of a wrong learning rate."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fedld.analysis.statistics import paired_difference
from fedld.records.reader import Run, by_label
from fedld.records.schema import RoundColumn
from fedld.study.measures import finite_scores, mean_of
from fedld.tasks.measure import Measure

if TYPE_CHECKING:
    from fedld.study.comparison import Comparison


TERMS: dict[str, RoundColumn] = {
    "local": "local_loss",
    "shift": "shift_loss",
    "aggregation": "aggregation_loss",
}
MEANING = {
    "local": "how well clients fit their own data",
    "shift": "how badly a client's model does on the others' data",
    "aggregation": "what merging the models costs",
}


@dataclass(frozen=True, kw_only=True)
class Account:
    """One method, means over its seeds; None where nothing was recorded.

    `step` and `cosine` compare the server's step with the plain average's over all rounds; the terms are
    those of the last decomposed round (Eq. 2).
    """

    label: str
    step: float | None
    cosine: float | None
    local: float | None
    shift: float | None
    aggregation: float | None
    total: float | None

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "step / average's",
        "cosine",
        "local loss",
        "+ shift",
        "+ aggregation",
        "= global loss",
    )

    def cells(self) -> list[str]:
        """Format the cells in the order of `COLUMNS`."""
        return [
            *(_text(value, ".2f") for value in (self.step, self.cosine, self.local)),
            *(_text(value, "+.2f") for value in (self.shift, self.aggregation)),
            _text(self.total, ".2f"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return asdict(self)


def account_of(label: str, runs: Sequence[Run]) -> Account:
    """Average the step and the terms over a method's runs, from their records."""
    served = any("test" in line for run in runs for line in run.rounds.lines)

    def over(key: RoundColumn) -> float | None:
        return mean_of([mean_of(list(run.series(key).values())) for run in runs]) if served else None

    def last(key: RoundColumn) -> float | None:
        series = [{r: v for r, v in run.series(key).items() if np.isfinite(v)} for run in runs]
        return mean_of([values[max(values)] for values in series if values])

    local, shift, aggregation, total = map(last, (*TERMS.values(), "global_loss"))
    if not served:  # `local` has no server: no client has the average that was decomposed
        aggregation = total = None
    return Account(
        label=label,
        step=over("norm_ratio"),
        cosine=over("cosine_to_average"),
        local=local,
        shift=shift,
        aggregation=aggregation,
        total=total,
    )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Winner minus rival in every term of Eq. 2, mean over paired seeds or folds; negative is better."""

    round: int
    seeds: int
    terms: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    unit: str = "seed"  # or "fold": what is paired

    @property
    def total(self) -> float:
        """Difference of L(w): the terms add up to it."""
        return sum(self.terms.values())

    @property
    def clear(self) -> bool:
        """Whether the interval of that term excludes 0; one seed has no interval and cannot say."""
        interval = self.intervals[self.term]
        return interval is not None and (interval[0] > 0 or interval[1] < 0)

    @property
    def term(self) -> str:
        """The term with the largest part in the total's direction."""
        return min(self.terms, key=lambda name: self.terms[name] * (1 if self.total <= 0 else -1))


def explain(runs: Sequence[Run], winner: str, rival: str) -> Explanation | None:
    """Compare the terms at the last round that both methods decomposed with the same seeds or folds."""
    ours, theirs = (_paired_terms([run for run in runs if run.label == label]) for label in (winner, rival))
    seeds = [seed for seed in ours if ours[seed] and theirs.get(seed)]
    shared = [set(ours[seed]) & set(theirs[seed]) for seed in seeds]
    common = set.intersection(*shared) if shared else set()
    if not common:
        return None
    at = max(common)
    folds = runs[0].folds
    tests = {
        term: paired_difference(
            [ours[s][at][term] for s in seeds], [theirs[s][at][term] for s in seeds], folds=folds
        )
        for term in TERMS
    }
    return Explanation(
        round=at,
        seeds=len(seeds),
        terms={k: t.mean for k, t in tests.items()},
        intervals={k: t.interval for k, t in tests.items()},
        unit="seed" if folds is None else "fold",
    )


def _paired_terms(runs: Sequence[Run]) -> dict[int, dict[int, dict[str, float]]]:
    """Collect terms by seed (or by fold, as means over its seeds) and by round."""
    grouped: dict[int, list[dict[int, dict[str, float]]]] = {}
    for run in runs:
        grouped.setdefault(run.pair, []).append(_terms(run))
    means = {}
    for pair, several in grouped.items():
        shared = set.intersection(*(set(terms) for terms in several))
        means[pair] = {r: {t: fmean(terms[r][t] for terms in several) for t in TERMS} for r in shared}
    return means


def _terms(run: Run) -> dict[int, dict[str, float]]:
    """Collect the signed terms of the decomposed rounds."""
    series = {term: run.series(key) for term, key in TERMS.items()}
    terms_by_round = {r: {term: series[term][r] for term in TERMS} for r in series["local"]}
    return {r: terms for r, terms in terms_by_round.items() if all(np.isfinite(x) for x in terms.values())}


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


RISE = 1.0  # points (of measures without a unit hundredths) over the last fifth of the rounds
OTHER_LENGTH = 1.5  # factor from which a measured step says that the average's length is wrong


def rate_warnings(comparison: "Comparison") -> list[str]:
    """Check whether measured steps or rising curves speak against the baseline's learning rate.

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
    """Give the command that searches around a run's learning rate."""
    lr = float(run.config.get("lr", 0.05))
    values = ",".join(f"{lr * factor:g}" for factor in (0.25, 0.5, 1, 2, 4))
    config = str(run.path / "config.toml")
    return shlex.join(["fedld", "tune", "--config", config, "--grid", f"lr={values}"])


def _measured(baseline: str, runs: dict[str, list[Run]]) -> list[str]:
    """Check the steps that another method's clients measured: a length far from the average's is a sign."""
    for label, method_runs in runs.items():
        lengths = [length for run in method_runs for length in _chosen_lengths(run)]
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
    """Name the deciding methods with a primary measure that still improves at the end, in every seed."""
    deciding = [comparison.baseline]
    if comparison.winner is not None and comparison.winner.label != comparison.baseline:
        deciding.append(comparison.winner.label)
    measure = comparison.primary_measure
    rises = {label: _rise(runs[label], measure, comparison.round) for label in deciding if label in runs}
    least = RISE if measure.unit == "%" else RISE / 100
    named = [
        f"{label} ({measure.sign * rise:+.{measure.digits}f}{measure.points})"
        for label, rise in rises.items()
        if rise >= least
    ]
    if not named:
        return []
    verb = "rises" if measure.sign > 0 else "falls"
    return [f"the {measure.title} of {' and '.join(named)} still {verb} over the last fifth of the rounds"]


def _rise(runs: Sequence[Run], measure: Measure, at: int) -> float:
    """Average the gain of the last fifth of the rounds over the fifth before; 0 unless every seed gains."""
    gains = []
    for run in runs:
        values = np.array(list(finite_scores(run, measure, at).values()))
        part = max(2, len(values) // 5)
        if len(values) < 2 * part:
            return 0.0
        gains.append(measure.sign * float(values[-part:].mean() - values[-2 * part : -part].mean()))
    return fmean(gains) if gains and min(gains) > 0 else 0.0
