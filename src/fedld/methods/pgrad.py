from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import Principal, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class PGrad(Method):
    """Principal gradients of the clients' updates: the four leading axes, oriented by all, used directly."""

    rule: Rule = field(default_factory=lambda: Principal(conflict="pgrad", components=4))

    card: ClassVar[Card] = Card("PGrad", "Wang et al. 2023")
