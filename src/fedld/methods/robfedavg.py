from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import OutlierPruned, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class RobFedAvg(Method):
    """FedAvg after pruning outliers coordinate by coordinate.

    The paper's threshold is not public; ours is `k` times the median absolute deviation (option of the rule).
    """

    rule: Rule = field(default_factory=OutlierPruned)

    card: ClassVar[Card] = Card("RobFedAvg", "Uddin et al. 2021")
