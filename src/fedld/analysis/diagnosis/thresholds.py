"""The one table of thresholds that a diagnosis follows from (shown in docs/decomposition.md)."""

from dataclasses import dataclass


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
    """Value of a threshold."""
    return THRESHOLDS[name].value
