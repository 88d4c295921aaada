from dataclasses import dataclass, field
from typing import ClassVar

from fedld.local import Objective
from fedld.local.contextual import NotTrueDistilled
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedNTD(Method):
    """FedAvg whose clients keep what the incoming model says of the classes that are not true."""

    objective: Objective = field(default_factory=NotTrueDistilled)

    card: ClassVar[Card] = Card("FedNTD", "Lee et al. 2022")
    sums_suffice: ClassVar[bool] = True
