from dataclasses import dataclass, field
from typing import ClassVar

from fedld.local import Objective
from fedld.local.contextual import LogitAdjusted
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class BalancedSoftmax(Method):
    """FedAvg with logits adjusted by the logarithm of the client's class counts."""

    objective: Objective = field(default_factory=LogitAdjusted)

    card: ClassVar[Card] = Card("Balanced softmax", "Ren et al. 2020")
    sums_suffice: ClassVar[bool] = True
