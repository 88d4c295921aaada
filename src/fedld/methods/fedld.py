"""FedLD as published, and the arithmetic of its released code."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate, Mean, Principal, Rule
from fedld.layout import Layout
from fedld.local import Objective
from fedld.local.objectives import MarginLog, Official
from fedld.methods.base import Card, ClientWeights, Method, Replies, Server


@dataclass(frozen=True)
class FedLD(Method):
    """Margin control on the clients (Eq. 3), principal-gradient aggregation on the server (Eq. 4-7).

    The client and server steps are FedAvg's; what changes is what the clients minimise and how the server
    combines: the objective bounds the distribution-shift loss, the rule the aggregation loss (Eq. 2).
    """

    objective: Objective = field(default_factory=MarginLog)
    rule: Rule = field(default_factory=Principal)

    sums_suffice: ClassVar[bool] = True
    card: ClassVar[Card] = Card("FedLD", "Zeng et al. 2024")


@dataclass(frozen=True)
class FedLDOfficial(Method):
    """The arithmetic of FedLD's released code, for comparison with the paper's.

    The margin term sees probabilities and the whole batch; the axes are weighted by the sum of all
    eigenvalues, tensor by tensor, which shortens the step; clients count alike; the first round is a plain
    mean. Buffers are averaged, as everywhere here (the released code treats them as parameters).
    """

    objective: Objective = field(default_factory=Official)
    rule: Rule = field(default_factory=lambda: Principal(weighting="sum"))
    granularity: str = "tensor"
    client_weights: ClientWeights = "uniform"

    card: ClassVar[Card] = Card("FedLD, released code", "Zeng et al. 2024")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store that nothing has moved yet."""
        return Server(weights, {"moved": torch.tensor(False)})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Use the plain mean until the model has moved once, the rule afterwards."""
        rule = self.rule if server.extra["moved"] else Mean()
        combined = replace(self, rule=rule).aggregate(replies)
        server = replace(server, extra={"moved": server.extra["moved"] | combined.update.any()})
        return self.step(server, replies, combined.update), combined
