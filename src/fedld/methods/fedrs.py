from dataclasses import dataclass, field
from typing import ClassVar

from fedld.local import Objective
from fedld.local.contextual import RestrictedSoftmax
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedRS(Method):
    """FedAvg with the softmax restricted where the client has no samples of a class."""

    objective: Objective = field(default_factory=RestrictedSoftmax)

    card: ClassVar[Card] = Card("FedRS", "Li and Zhan 2021")
    sums_suffice: ClassVar[bool] = True
