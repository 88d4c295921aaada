from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedld.methods.base import Card
from fedld.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam whose second moment moves additively: v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    card: ClassVar[Card] = Card("FedYogi", "Reddi et al. 2021")

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """A step of fixed size towards the square, however far it is."""
        return v - (1 - self.beta2) * square * (v - square).sign()
