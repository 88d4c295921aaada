"""Results by site: measures on its own test pictures with intervals, and the rounds in which it took part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedld.analysis.intervals import (
    Estimate,
    Groups,
    accuracy_interval,
    auroc_interval,
    log_odds,
    mean_interval,
    sensitivity_interval,
)
from fedld.records.schema import ClientLine


@dataclass(frozen=True, kw_only=True)
class SiteResult:
    """Measures with 95 % intervals on the test pictures of one site."""

    pictures: int
    patients: int | None
    accuracy: Estimate
    auroc: Estimate
    sensitivity: Estimate

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return asdict(self)

    @property
    def estimates(self) -> tuple[Estimate, Estimate, Estimate]:
        """Accuracy, AUROC and sensitivity."""
        return self.accuracy, self.auroc, self.sensitivity


def site_result(
    probabilities: ArrayLike,
    right: NDArray[np.bool_],
    labels: NDArray[np.int64],
    positive: int,
    specificity: float = 0.9,
    groups: Groups = None,
) -> SiteResult:
    """Compute Wilson's interval of the accuracy, DeLong's of the AUROC, a bootstrap of the sensitivity.

    `right` says which pictures are classified rightly, `positive` is the class of the sensitivity, at
    a threshold of this `specificity`.
    """
    p = np.asarray(probabilities, np.float64)
    odds = log_odds(p) if np.isfinite(p).all() else p
    return SiteResult(
        pictures=len(labels),
        patients=None if groups is None else len(np.unique(np.asarray(groups))),
        accuracy=accuracy_interval(right, groups),
        auroc=auroc_interval(odds, labels, groups),
        sensitivity=sensitivity_interval(odds[:, positive], labels == positive, specificity, groups),
    )


@dataclass(frozen=True)
class CaseResult:
    """Means over the test cases of one site with 95 % intervals, by measure."""

    pictures: int
    patients: int | None
    measures: dict[str, Estimate]

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        return asdict(self)


def case_result(
    values: Mapping[str, NDArray[np.float64]], bounds: Mapping[str, float], groups: Groups = None
) -> CaseResult:
    """Average measures over cases.

    Args:
        values: one number for every case, by measure.
        bounds: the largest value that a measure can have, if there is one; intervals end there and at 0.
        groups: patient of each case.

    >>> case_result({"dice": np.array([0.9, 1.0])}, {"dice": 1.0}).measures["dice"].high
    1.0
    """
    measures = {}
    for name, column in values.items():
        estimate = mean_interval(column, groups)
        if estimate.low is not None and estimate.high is not None:
            low = max(estimate.low, 0.0)
            estimate = Estimate(estimate.value, low, min(estimate.high, bounds.get(name, np.inf)))
        measures[name] = estimate
    return CaseResult(
        pictures=len(next(iter(values.values()))),
        patients=None if groups is None else len(np.unique(np.asarray(groups))),
        measures=measures,
    )


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A sampled client without a usable update, in one round or several."""

    client: str
    rounds: tuple[int, ...]  # in which it was missing
    sampled: int  # rounds in which it was sampled
    until_end: bool  # missing in every round that asked for it, from some round to the last
    reasons: dict[str, int]
    share: float | None  # of all clients' samples

    @property
    def since(self) -> int:
        """First round of the absence; of the one that lasts, if it lasts."""
        gaps = [b for a, b in zip(self.rounds, self.rounds[1:], strict=False) if b > a + 1]
        return gaps[-1] if self.until_end and gaps else self.rounds[0]

    @property
    def reason(self) -> str:
        """The one given most often."""
        return max(self.reasons, key=lambda why: self.reasons[why])

    def sentence(self) -> str:
        """Describe the absence in one sentence."""
        when = f"from round {self.since} on" if self.until_end else _rounds(self.rounds)
        data = "" if self.share is None else f"; it holds {self.share:.0%} of the data"
        count = f"{len(self.rounds)} of {self.sampled} rounds"
        return f"{self.client} is missing {when} ({count}): {self.reason}{data}."


@dataclass(frozen=True)
class Participation:
    """Every client by round: used, missing with a reason, or not asked."""

    lines: Sequence[ClientLine]

    @cached_property
    def rounds(self) -> list[int]:
        """All recorded rounds."""
        return sorted({line["round"] for line in self.lines})

    @cached_property
    def clients(self) -> list[str]:
        """Names, in the order of the federation."""
        return [name for _, name in sorted({line["index"]: line["client"] for line in self.lines}.items())]

    @cached_property
    def missing(self) -> dict[tuple[str, int], str]:
        """Reason of every absence by client and round."""
        return {(x["client"], x["round"]): str(x["excluded"]) for x in self.lines if "excluded" in x}

    @cached_property
    def sampled(self) -> set[tuple[str, int]]:
        """Client and round of every client that was sampled."""
        return {(line["client"], line["round"]) for line in self.lines}

    @cached_property
    def absences(self) -> list[Absence]:
        """One for each client that was ever missing, those with most data first."""
        sizes = {line["client"]: line.get("size") or 0 for line in self.lines}
        total = sum(sizes.values())
        absences = []
        for client in self.clients:
            sampled = [r for r in self.rounds if (client, r) in self.sampled]
            gone = tuple(r for r in sampled if (client, r) in self.missing)
            if gone:
                reasons = Counter(self.missing[client, r] for r in gone)
                share = sizes[client] / total if total else None
                absences.append(
                    Absence(
                        client=client,
                        rounds=gone,
                        sampled=len(sampled),
                        until_end=gone[-1] == sampled[-1],
                        reasons=dict(reasons),
                        share=share,
                    )
                )
        return sorted(absences, key=lambda absence: -(absence.share or 0.0) * len(absence.rounds))


def _rounds(rounds: tuple[int, ...]) -> str:
    """Describe rounds in words.

    >>> _rounds((3,)), _rounds((2, 5, 9, 11))
    ('in round 3', 'in rounds 2, 5, 9 ...')
    """
    if len(rounds) == 1:
        return f"in round {rounds[0]}"
    return "in rounds " + ", ".join(map(str, rounds[:3])) + (" ..." if len(rounds) > 3 else "")
