from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import GradientHarmonisation, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class FedGH(Method):
    """Gradient harmonisation: of two updates that oppose each other, each loses its part along the other.

    The field knows another "FedGH" (global header); this is the one the paper compares with.
    """

    rule: Rule = field(default_factory=GradientHarmonisation)

    card: ClassVar[Card] = Card("FedGH", "Zhang et al. 2024")
