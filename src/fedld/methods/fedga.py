from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server, shares
from fedld.methods.features import BATCH


@dataclass(frozen=True)
class GeneralisationAdjustment(Method):
    """A client counts for more, the more its loss rose by aggregation (Zhang et al. 2023, GA).

    Client:  gap_i = L_i(w_t) - L_i(w_i of its last round), known when it trains again
    Server:  a_i <- a_i + (d / N) gap_i / max_j |gap_j|, cut to [0, 1] and normalised; the mean with a

    a starts as the p_i. Gaps are measured on the training samples, in eval mode.
    """

    d: float = 0.2

    card: ClassVar[Card] = Card("GA", "Zhang et al. 2023", communication="a number up (gap)")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Weights of all clients."""
        return Server(weights, {"a": shares(sizes, self.client_weights)})

    def client_update(self, client: LocalClient) -> Reply:
        """FedAvg's, with the client's loss before and after training."""
        before = self.mean_loss(client)
        gap = before - client.state.get("after", before)
        client.train(self.loss)
        return client.reply(message={"gap": gap}, state={"after": self.mean_loss(client)})

    @torch.no_grad()
    def mean_loss(self, client: LocalClient) -> Tensor:
        """The objective over all of the client's samples, in eval mode."""
        client.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for images, labels in client.samples.in_order(BATCH):
            total += len(labels) * self.loss(client.context(images, labels)).double().cpu()
        return total / len(client.samples)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """New weights from the gaps, then FedAvg's step with them."""
        a, here = server.extra["a"].clone(), replies.rows
        gap = replies.stack("gap")
        if gap.any():
            a[here] = (a[here] + self.d / len(a) * gap / gap.abs().max()).clamp(0, 1)
            a = a / a.sum()
        server = replace(server, extra={"a": a})
        return super().server_update(server, replies.weighted(a[here]))
