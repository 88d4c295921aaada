from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from fedld.local import Objective
from fedld.local.contextual import Decorrelated
from fedld.methods.base import Card, Method
from fedld.models import as_model


@dataclass(frozen=True)
class FedDecorr(Method):
    """FedAvg whose clients keep their features from collapsing into a few dimensions."""

    objective: Objective = field(default_factory=Decorrelated)

    card: ClassVar[Card] = Card("FedDecorr", "Shi et al. 2023")
    sums_suffice: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """It needs features and a head."""
        as_model(model)
