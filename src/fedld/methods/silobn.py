from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedld.methods.base import Card
from fedld.methods.fedbn import FedBN


@dataclass(frozen=True)
class SiloBN(FedBN):
    """FedBN for the statistics alone: BatchNorm's means and variances stay with their client.

    Its scales and shifts are averaged like everything else.
    """

    card: ClassVar[Card] = Card(
        "SiloBN",
        "Andreux et al. 2020",
        personal="BatchNorm statistics",
        communication="none, statistics only up",
    )

    def private(self, model: nn.Module) -> frozenset[str]:
        """Statistics of every BatchNorm."""
        return super().private(model) - {name for name, _ in model.named_parameters()}
