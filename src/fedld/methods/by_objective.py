"""Methods that differ from FedAvg in what a client minimises, and in nothing else."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from fedld.local import Objective
from fedld.local.objectives import (
    Decorrelated,
    LogitAdjusted,
    LogitCalibrated,
    NotTrueDistilled,
    RestrictedSoftmax,
)
from fedld.methods.base import Card, Method
from fedld.models import as_model


@dataclass(frozen=True)
class BalancedSoftmax(Method):
    """FedAvg with logits adjusted by the logarithm of the client's class counts."""

    objective: Objective = field(default_factory=LogitAdjusted)

    card: ClassVar[Card] = Card("Balanced softmax", "Ren et al. 2020")
    sums_suffice: ClassVar[bool] = True


@dataclass(frozen=True)
class FedLC(Method):
    """FedAvg with logits calibrated by the client's class counts."""

    objective: Objective = field(default_factory=LogitCalibrated)

    card: ClassVar[Card] = Card("FedLC", "Zhang et al. 2022")
    sums_suffice: ClassVar[bool] = True


@dataclass(frozen=True)
class FedRS(Method):
    """FedAvg with the softmax restricted where the client has no samples of a class."""

    objective: Objective = field(default_factory=RestrictedSoftmax)

    card: ClassVar[Card] = Card("FedRS", "Li and Zhan 2021")
    sums_suffice: ClassVar[bool] = True


@dataclass(frozen=True)
class FedNTD(Method):
    """FedAvg with a term that keeps the incoming model's predictions of the classes that are not true."""

    objective: Objective = field(default_factory=NotTrueDistilled)

    card: ClassVar[Card] = Card("FedNTD", "Lee et al. 2022")
    sums_suffice: ClassVar[bool] = True


@dataclass(frozen=True)
class FedDecorr(Method):
    """FedAvg with a term that keeps features from collapsing into a few dimensions."""

    objective: Objective = field(default_factory=Decorrelated)

    card: ClassVar[Card] = Card("FedDecorr", "Shi et al. 2023")
    sums_suffice: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)
