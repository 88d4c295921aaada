from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedld.aggregation import Aggregate
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies


@dataclass(frozen=True)
class FedNova(Method):
    """Normalised averaging: a client that took more steps does not count for more.

    x <- x + sum_i p_i (tau_eff / tau_i) g_i with tau_eff = sum_i p_i tau_i; tau_i is the number of local
    steps, or with momentum the sum of the gradients' weights (|a_i|_1 of the paper). Adam's steps count as
    one each. Rates by client are not evened out: tau_i is in units of the client's own rate.
    """

    card: ClassVar[Card] = Card("FedNova", "Wang et al. 2020", communication="a number up")

    def client_update(self, client: LocalClient) -> Reply:
        """FedAvg's, with tau_i."""
        client.train(self.loss)
        tau = client.rate_sum / client.rate
        return client.reply(message={"tau": torch.tensor(tau, dtype=torch.float64)})

    def aggregate(self, replies: Replies) -> Aggregate:
        """The rule applied to updates of one common length of training."""
        tau = torch.stack([message["tau"] for message in replies.messages])
        factor = (replies.p @ tau / tau).to(replies.updates.dtype)
        updates = replies.updates.clone()
        replies.layout.shared_parameters(updates).mul_(factor[:, None])
        return super().aggregate(replace(replies, updates=updates))
