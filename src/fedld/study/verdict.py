"""Which method won, by how much, whether that is more than chance, and which loss term explains it."""

from dataclasses import dataclass, replace

import numpy as np

from fedld.analysis.statistics import PairedDifference, holm, paired_difference
from fedld.methods import METHODS
from fedld.study.runs import Run, number

LEVEL = 0.05
TERMS = ("local", "shift", "aggregation")
MEANING = {
    "local": "how well clients fit their own data",
    "shift": "how badly a client's model does on the others' data",
    "aggregation": "what merging the models costs",
}


@dataclass(frozen=True)
class Standing:
    """One method: final accuracy of the global model for every seed, in percent, against the baseline's."""

    label: str
    accuracy: dict[int, float]
    difference: PairedDifference | None
    p_value: float | None  # Holm's, over all methods of the comparison
    reference: bool = False  # a bound such as `central`: it is compared, but cannot win

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return float(np.mean(list(self.accuracy.values()))) if self.accuracy else float("nan")

    @property
    def sd(self) -> float | None:
        """Spread over seeds."""
        return float(np.std(list(self.accuracy.values()), ddof=1)) if len(self.accuracy) > 1 else None

    @property
    def significant(self) -> bool | None:
        """Whether Holm's p is below 5 %; None where it cannot be tested."""
        return None if self.p_value is None else self.p_value < LEVEL


@dataclass(frozen=True)
class Explanation:
    """Winner minus rival in every term of Eq. 2, mean over paired seeds; negative is better."""

    round: int
    seeds: int
    terms: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]

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


@dataclass(frozen=True)
class Verdict:
    """The comparison in one value."""

    round: int
    baseline: str
    standings: list[Standing]  # best first, references last
    rival: str | None  # the baseline; where that won, the next best
    explanation: Explanation | None

    @property
    def winner(self) -> Standing:
        """The federated method with the highest accuracy over the seeds it shares with the baseline."""
        return self.standings[0]

    @property
    def decisive(self) -> Standing | None:
        """The paired test that decides: the winner's, or the rival's where the baseline won."""
        label = self.rival if self.winner.label == self.baseline else self.winner.label
        return next((s for s in self.standings if s.label == label and s.difference), None)


def judge(runs: list[Run], baseline: str | None) -> Verdict | None:
    """Compare methods; None if no run has an accuracy yet."""
    at, compared = _comparable(runs)
    accuracy = _accuracies(compared, at)
    if not accuracy:
        return None
    if baseline not in accuracy:
        baseline = "fedavg" if "fedavg" in accuracy else next(iter(accuracy))
    bounds = {run.label for run in compared if _is_reference(run)}
    standings = [replace(s, reference=s.label in bounds) for s in _standings(accuracy, baseline)]
    standings.sort(key=lambda s: (s.reference, -_lead(s, baseline)))
    tested = [s.label for s in standings if s.difference]
    rival = baseline if standings[0].label != baseline else next(iter(tested), None)
    explanation = explain(compared, standings[0].label, rival) if rival else None
    return Verdict(at, baseline, standings, rival, explanation)


def _is_reference(run: Run) -> bool:
    """Whether the run's method is a bound and not a way to train a federation."""
    method = run.config.get("method")
    name = method.get("name") if isinstance(method, dict) else method
    return name in METHODS and METHODS[name].card.paper == "reference"


def _lead(standing: Standing, baseline: str) -> float:
    """What methods are ranked by: the paired difference, since means over other seeds are not comparable."""
    if standing.difference is not None:
        return standing.difference.mean
    return 0.0 if standing.label == baseline else float("-inf")


def _comparable(runs: list[Run]) -> tuple[int, list[Run]]:
    """Finished runs; if fewer than two methods have finished, all of them at the last round they share."""
    finished = [run for run in runs if run.finished and run.rounds.lines]
    if len({run.label for run in finished}) < min(2, len({run.label for run in runs})):
        finished = [run for run in runs if any(np.isfinite(number(x, "accuracy")) for x in run.rounds.lines)]
    last = [max(line["round"] for line in run.rounds.lines) for run in finished]
    return min(last, default=0), finished


def _accuracies(runs: list[Run], at: int) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        series = [100 * number(line, "accuracy") for line in run.rounds.lines if line["round"] <= at]
        finite = [value for value in series if np.isfinite(value)]
        if finite:
            found.setdefault(run.label, {})[run.seed] = finite[-1]
    return found


def _standings(accuracy: dict[str, dict[int, float]], baseline: str) -> list[Standing]:
    base, tests = accuracy[baseline], {}
    for label, values in accuracy.items():
        seeds = sorted(values.keys() & base.keys())
        if label != baseline and seeds:
            tests[label] = paired_difference([values[s] for s in seeds], [base[s] for s in seeds])
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    return [
        Standing(label, values, tests.get(label), adjusted.get(label)) for label, values in accuracy.items()
    ]


def explain(runs: list[Run], winner: str, rival: str) -> Explanation | None:
    """Difference of the terms at the last round that both methods decomposed with the same seeds."""
    ours, theirs = (
        {run.seed: _terms(run) for run in runs if run.label == label} for label in (winner, rival)
    )
    seeds = [seed for seed in ours if ours[seed] and theirs.get(seed)]
    shared = [set(ours[seed]) & set(theirs[seed]) for seed in seeds]
    common = set.intersection(*shared) if shared else set()
    if not common:
        return None
    at = max(common)
    tests = {
        term: paired_difference([ours[s][at][term] for s in seeds], [theirs[s][at][term] for s in seeds])
        for term in TERMS
    }
    return Explanation(
        at, len(seeds), {k: t.mean for k, t in tests.items()}, {k: t.interval for k, t in tests.items()}
    )


def _terms(run: Run) -> dict[int, dict[str, float]]:
    """Signed terms of the decomposed rounds."""
    found = {line["round"]: {t: number(line, f"{t}_loss") for t in TERMS} for line in run.rounds.lines}
    return {r: terms for r, terms in found.items() if all(np.isfinite(x) for x in terms.values())}
