from dataclasses import dataclass, field
from typing import ClassVar

from fedld.local import Objective
from fedld.local.contextual import LogitCalibrated
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedLC(Method):
    """FedAvg with logits calibrated by the client's class counts."""

    objective: Objective = field(default_factory=LogitCalibrated)

    card: ClassVar[Card] = Card("FedLC", "Zhang et al. 2022")
    sums_suffice: ClassVar[bool] = True
