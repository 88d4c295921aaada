"""What a diagnosis is made from and what it consists of. Plain data: lines of a run directory, arrays."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from numpy.typing import ArrayLike

from fedld.analysis.decomposition import Decomposition, decompose_line
from fedld.analysis.diagnosis.thresholds import limit
from fedld.analysis.heterogeneity import LabelMeasures, label_measures
from fedld.records.schema import ClientLine, ConflictLine, CrossLine, Predictions, RoundLine, TrialRecord


@dataclass(frozen=True)
class Evidence:
    """Whatever was measured of one federation; a part left empty yields no sentence.

    clients          names, in the order of label_counts and of the rows of cross_loss
    label_counts     (clients, classes)
    feature_means    (clients, F) mean features of a model, with feature_spreads (clients,)
    rounds           lines of rounds.jsonl
    client_rounds    lines of clients.jsonl
    reports          lines of conflict.jsonl: an aggregation `Report` and its round
    cross_losses     lines of cross_loss.jsonl
    predictions      classes and confusion matrix of the final model
    rule             name of the aggregation rule
    """

    clients: Sequence[str] = ()
    label_counts: ArrayLike | None = None
    feature_means: ArrayLike | None = None
    feature_spreads: ArrayLike | None = None
    rounds: Sequence[RoundLine] = ()
    client_rounds: Sequence[ClientLine] = ()
    reports: Sequence[ConflictLine] = ()
    cross_losses: Sequence[CrossLine] = ()
    predictions: Predictions | None = None
    rule: str | None = None

    @cached_property
    def labels(self) -> LabelMeasures | None:
        """Measures of the label counts."""
        return None if self.label_counts is None else label_measures(self.label_counts)

    @cached_property
    def decompositions(self) -> list[tuple[int, Decomposition]]:
        """Eq. 2 of every recorded round in which a client that trained was measured, in order."""
        lines = sorted(self.cross_losses, key=lambda line: int(line["round"]))
        terms = [(int(line["round"]), decompose_line(line)) for line in lines]
        return [(round_, found) for round_, found in terms if found is not None]

    @property
    def trials(self) -> list[TrialRecord]:
        """What the clients measured of candidate steps, round by round, where they were asked."""
        return [trial for line in self.reports if (trial := line.get("trial")) is not None]

    def name(self, client: int | None) -> str:
        """Name of a client given by its index."""
        return self.clients[client] if client is not None and client < len(self.clients) else str(client)

    @property
    def labels_agree(self) -> bool:
        """Whether labels were counted and show no skew."""
        return self.labels is not None and not skewed(self.labels)

    @property
    def not_measured(self) -> list[str]:
        """Parts that are missing, in words."""
        parts = {
            "labels": self.label_counts is not None,
            "features": self.feature_means is not None and self.feature_spreads is not None,
            "training curve": bool(self.rounds),
            "client records": bool(self.client_rounds),
            "updates": bool(self.reports),
            "loss decomposition": bool(self.cross_losses),
            "BatchNorm statistics": any(line.get("buffer_disagreement") is not None for line in self.rounds),
        }
        return [part for part, measured in parts.items() if not measured]


@dataclass(frozen=True)
class Finding:
    """One sentence, the numbers behind it, the check and thresholds it follows from, and what to try."""

    check: str
    level: Literal["info", "warning"]
    sentence: str
    numbers: dict[str, Any]
    thresholds: dict[str, float]
    advice: str

    def to_json(self) -> dict[str, Any]:
        """The same as a plain dictionary."""
        return asdict(self)


def warning(
    rule: str, sentence: str, numbers: dict[str, Any], thresholds: Sequence[str], advice: str
) -> Finding:
    """A finding that something hurts, by the named thresholds."""
    return Finding(rule, "warning", sentence, numbers, {name: limit(name) for name in thresholds}, advice)


def skewed(labels: LabelMeasures) -> bool:
    """Whether labels differ between clients more than chance explains."""
    return labels.skew >= limit("label_skew") and labels.p_value < limit("label_p_value")


def listing(names: Sequence[str], most: int = 5) -> str:
    """Names in a sentence.

    >>> listing(["a", "b"]), listing(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
