from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import Principal, Rule
from fedld.local import Objective
from fedld.local.objectives import MarginLog
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedLD(Method):
    """Margin control on the clients (Eq. 3), principal-gradient aggregation on the server (Eq. 4-7).

    The client and server steps are FedAvg's; what changes is what the clients minimise and how the server
    combines: the objective bounds the distribution-shift loss, the rule the aggregation loss (Eq. 2).
    """

    objective: Objective = field(default_factory=MarginLog)
    rule: Rule = field(default_factory=Principal)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("FedLD", "Zeng et al. 2024")
