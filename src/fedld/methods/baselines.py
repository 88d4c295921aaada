"""Plain averaging, and its two bounds: clients that train alone, and pooled data."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from torch import nn

from fedld.aggregation import Aggregate
from fedld.data import Client, Federation
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class FedAvg(Method):
    """Each client trains on its own samples; the server averages the models with weights n_i / n (Eq. 1)."""

    card: ClassVar[Card] = Card("FedAvg", "McMahan et al. 2017")
    sums_suffice: ClassVar[bool] = True


@dataclass(frozen=True)
class Local(Method):
    """No federation, the lower reference: every client keeps its whole model, and there is no global one."""

    card: ClassVar[Card] = Card("Local", "reference", personal="whole model", communication="nothing")
    personalised: ClassVar[bool] = True
    has_global: ClassVar[bool] = False

    def private(self, model: nn.Module) -> frozenset[str]:
        """Name every parameter and buffer."""
        return frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Change nothing: there is no global model."""
        return server, self.aggregate(replies)


@dataclass(frozen=True)
class Central(Method):
    """All data in one place, the upper reference: SGD on the pooled samples, the same epochs a round."""

    card: ClassVar[Card] = Card("Central", "reference", communication="all data up")

    def federation(self, federation: Federation) -> Federation:
        """Make one client of all clients' samples."""
        owned = ((client.train, client.test, client.validation) for client in federation.clients)
        train, test, validation = (np.sort(np.concatenate(part)) for part in zip(*owned, strict=True))
        return replace(
            federation, clients=(Client(name="pooled", train=train, test=test, validation=validation),)
        )
