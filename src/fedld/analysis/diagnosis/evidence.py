"""What a diagnosis is made from and what it consists of, as plain data, and the thresholds of its checks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from numpy.typing import ArrayLike

from fedld.analysis.decomposition import Decomposition, decompose_line
from fedld.analysis.heterogeneity import LabelMeasures, label_measures
from fedld.records.schema import ClientLine, ConflictLine, CrossLine, Predictions, RoundLine, TrialRecord


@dataclass(frozen=True, kw_only=True)
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
    samples          what samples are called
    groups           names of what label_counts counts, where samples have no class
    targets          numbers about every client's targets, by name
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
    samples: str = "images"
    groups: Sequence[str] = ()
    targets: Sequence[Mapping[str, float]] = ()

    @cached_property
    def labels(self) -> LabelMeasures | None:
        """Measures of the label counts."""
        return None if self.label_counts is None else label_measures(self.label_counts)

    @cached_property
    def decompositions(self) -> list[tuple[int, Decomposition]]:
        """Eq. 2 of every recorded round in which a client that trained was measured, in order."""
        lines = sorted(self.cross_losses, key=lambda line: int(line["round"]))
        terms = [(int(line["round"]), decompose_line(line)) for line in lines]
        return [(round_, decomposition) for round_, decomposition in terms if decomposition is not None]

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


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence, the numbers behind it, the check and thresholds it follows from, and what to try."""

    check: str
    level: Literal["info", "warning"]
    sentence: str
    numbers: dict[str, Any]
    thresholds: dict[str, float]
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Give a plain dictionary."""
        return asdict(self)


def warning(
    rule: str, sentence: str, numbers: dict[str, Any], thresholds: Sequence[str], advice: str
) -> Finding:
    """Make a finding of something harmful, by the named thresholds."""
    return Finding(
        check=rule,
        level="warning",
        sentence=sentence,
        numbers=numbers,
        thresholds={name: limit(name) for name in thresholds},
        advice=advice,
    )


def skewed(labels: LabelMeasures) -> bool:
    """Tell whether labels differ between clients more than chance explains."""
    return labels.skew >= limit("label_skew") and labels.p_value < limit("label_p_value")


def listing(names: Sequence[str], most: int = 5) -> str:
    """List names in a sentence.

    >>> listing(["a", "b"]), listing(list("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class Cutoff:
    """A number and what happens beyond it."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Cutoff] = {
    "label_skew": Cutoff(0.2, "label skew beyond chance (0 same, 1 disjoint) from which labels differ"),
    "label_p_value": Cutoff(0.01, "p value below which chance does not explain the label skew"),
    "single_class": Cutoff(1.1, "effective number of classes up to which a client holds one class"),
    "size_imbalance": Cutoff(1.0, "standard deviation over mean of the sizes from which sizes differ"),
    "feature_shift": Cutoff(0.5, "distance of mean features beyond chance, in spreads inside a client"),
    "opposed_cosine": Cutoff(-0.2, "mean cosine across the split up to which two groups are opposed"),
    "agreeing_cosine": Cutoff(0.1, "mean cosine inside the sides from which they are groups"),
    "minority_weight": Cutoff(0.1, "share of the samples from which the smaller side is a group"),
    "conflict_cosine": Cutoff(-0.05, "cosine below which two updates are in conflict"),
    "conflict_rate": Cutoff(0.25, "share of pairs in conflict from which conflict is common"),
    "cancellation": Cutoff(0.5, "squared length of the mean update, in that of orthogonal updates"),
    "norm_ratio": Cutoff(0.5, "length of the step, in that of the plain average, below which it shrinks"),
    "cosine_to_average": Cutoff(0.5, "cosine of the step to the plain average below which it turns away"),
    "measured_gain": Cutoff(0.002, "gain in loss per round below which measuring gains little"),
    "outlier_share": Cutoff(0.25, "share of rounds from which a client that stands out is named"),
    "client_cosine": Cutoff(-0.05, "median cosine to the step below which a client is overruled"),
    "sign_margin": Cutoff(0.00001, "sign margin below which a vote on an axis may flip"),
    "eigen_gap": Cutoff(0.00001, "relative eigen-gap below which axes are not unique"),
    "shift_share": Cutoff(
        0.25, "share of the global loss, after what averaging repairs, from which shift costs"
    ),
    "aggregation_share": Cutoff(0.1, "share of the global loss from which aggregation costs"),
    "loss_floor": Cutoff(0.1, "loss below which a term is too small to matter"),
    "client_share": Cutoff(0.1, "change by aggregation, in the global loss, from which a client counts"),
    "trend": Cutoff(0.25, "relative change from which a term rises or falls between first and last record"),
    "standard_errors": Cutoff(2.0, "standard errors below which an estimated term may be 0"),
    "buffer_disagreement": Cutoff(0.04, "spread of BatchNorm means, in running standard deviations"),
    "above_chance": Cutoff(0.02, "balanced accuracy over 1 / classes up to which nothing was learned"),
    "absent_rounds": Cutoff(1.0, "rounds without a client from which its absence is reported"),
}


def limit(name: str) -> float:
    """Look up the value of a threshold."""
    return THRESHOLDS[name].value
