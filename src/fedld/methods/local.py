from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedld.aggregation import Aggregate
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class Local(Method):
    """No federation, the lower reference: every client keeps its whole model, and there is no global one."""

    card: ClassVar[Card] = Card("Local", "reference", personal="whole model", communication="nothing")
    personalised: ClassVar[bool] = True
    has_global: ClassVar[bool] = False

    def private(self, model: nn.Module) -> frozenset[str]:
        """Every parameter and buffer."""
        return frozenset(name for name, _ in (*model.named_parameters(), *model.named_buffers()))

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """The server has nothing to do."""
        return server, self.aggregate(replies)
