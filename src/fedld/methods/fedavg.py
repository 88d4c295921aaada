from dataclasses import dataclass
from typing import ClassVar

from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Each client trains on its own samples; the server averages the models with weights n_i / n (Eq. 1)."""

    card: ClassVar[Card] = Card("FedAvg", "McMahan et al. 2017")
    sums_suffice: ClassVar[bool] = True
