from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import Consensus, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedConsensus(Method):
    """FedAvg whose server takes out of the average what the clients disagree on, at the average's length.

    It does not fall into the trap of the principal rule, whose first axis may be the conflict itself.
    """

    rule: Rule = field(default_factory=Consensus)

    card: ClassVar[Card] = Card("Consensus", "this project")
