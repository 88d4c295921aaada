from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server


@dataclass(frozen=True)
class FedDisco(Method):
    """Discrepancy-aware collaboration: a client with an uneven label distribution counts for less.

    weight_i ~ max(0, p_i - a d_i + b), where d_i is KL(label distribution of client i | uniform) divided by
    its sum over the round's clients: a and b belong to that scale, as in the authors' released code. If no
    weight is positive, the p_i remain.
    """

    a: float = 0.5
    b: float = 0.1

    card: ClassVar[Card] = Card("FedDisco", "Ye et al. 2023", communication="a number up (KL)")

    def client_update(self, client: LocalClient) -> Reply:
        """FedAvg's, and the client's discrepancy, which tells how uneven its labels are."""
        client.train(self.loss)
        # The network tells how many classes there are; asked in eval mode, it learns nothing from this batch.
        batch = client.context(*next(client.samples.in_order(1))).teacher
        return client.reply(message={"discrepancy": discrepancy(client.disclosed(batch.class_counts))})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """FedAvg's, with the weights of this round's clients changed."""
        discrepancies = replies.stack("discrepancy")
        share = discrepancies / discrepancies.sum() if discrepancies.any() else discrepancies
        weights = replies.p - self.a * share + self.b
        return super().server_update(server, replies.weighted(weights if weights.gt(0).any() else replies.p))


def discrepancy(counts: Tensor) -> Tensor:
    """KL(counts / n | uniform), from 0 to log C; 0 where a site sends the count of no class.

    >>> discrepancy(torch.tensor([5, 5])).item(), round(discrepancy(torch.tensor([9, 0])).item(), 4)
    (0.0, 0.6931)
    """
    if not counts.any():
        return torch.zeros((), dtype=torch.float64)
    share = counts.double() / counts.sum()
    divergence: Tensor = torch.special.xlogy(share, share * len(share)).sum()
    return divergence
