"""Methods that differ from FedAvg in the rule by which the server combines updates, and in nothing else."""

from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import Consensus, GradientHarmonisation, OutlierPruned, PrincipalGradient, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedConsensus(Method):
    """FedAvg, with what the clients disagree on removed from the average, at the average's length.

    It avoids a failure of the principal rule: the first axis may be the conflict itself.
    """

    rule: Rule = field(default_factory=Consensus)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("Consensus", "this project")


@dataclass(frozen=True)
class PGrad(Method):
    """Principal gradients: the four leading axes of the clients' centred models, at the average's length.

    The authors' trajectory goes from one domain to the next; clients train in parallel, so that ours is the
    start and the clients' models.
    """

    rule: Rule = field(default_factory=PrincipalGradient)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("PGrad", "Wang et al. 2023")


@dataclass(frozen=True)
class FedGH(Method):
    """Gradient harmonisation: of two updates that oppose each other, each loses its part along the other.

    The field knows another "FedGH" (global header); this is the one the paper compares with.
    """

    rule: Rule = field(default_factory=GradientHarmonisation)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("FedGH", "Zhang et al. 2024")


@dataclass(frozen=True)
class RobFedAvg(Method):
    """FedAvg after pruning outliers coordinate by coordinate.

    The paper's threshold is not public; ours is `k` times the median absolute deviation (option of the rule).
    """

    rule: Rule = field(default_factory=OutlierPruned)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("RobFedAvg", "Uddin et al. 2021")
