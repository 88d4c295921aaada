from dataclasses import dataclass, field
from typing import ClassVar

from fedld.aggregation import PrincipalGradient, Rule
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class PGrad(Method):
    """Principal gradients: the four leading axes of the clients' centred models, at the average's length.

    The authors' trajectory goes from one domain to the next; clients train in parallel, so that ours is the
    start and the clients' models.
    """

    rule: Rule = field(default_factory=PrincipalGradient)

    card: ClassVar[Card] = Card("PGrad", "Wang et al. 2023")
