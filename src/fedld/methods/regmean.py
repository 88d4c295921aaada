from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, MessageSum, Replies, Server
from fedld.methods.closed import SAFE, SUMS, SumsMethod
from fedld.methods.moments import head_inputs, head_of, set_head, sum_of, symmetric
from fedld.methods.sum_bounds import change_problem


@dataclass(frozen=True)
class RegMean(SumsMethod):
    """Local training as FedAvg's; heads are merged so that their outputs agree best with the clients' own.

    W = (sum_i A_i)^-1 sum_i A_i W_i, where A_i is client i's X'X. A client that is not sampled counts with
    the incoming head, so W = W_t + A^-1 sum_i A_i (W_i - W_t) with A over all clients seen so far. Clients
    send A_i once and A_i (W_i - W_t) in every round.
    """

    message_sums: ClassVar[Mapping[str, MessageSum]] = {
        **SUMS,
        "change": MessageSum(2.0**26, weighted=False, per_sample=True),
    }

    card: ClassVar[Card] = Card(
        "RegMean", "Jin et al. 2023", communication="second moments up, once; then a head more"
    )

    def client_update(self, client: LocalClient) -> Reply:
        """Train, and say how the outputs changed on the client's own images."""
        inputs, _ = head_inputs(client)
        client.train(self.loss)
        X = F.pad(inputs, (0, 1), value=1.0)
        views = client.layout.views(client.flat.vector - client.incoming)
        weight, bias = (views[name].double() for name in head_of(client.layout))
        change = torch.cat([weight, bias[:, None]], 1).T
        return client.reply(message={"change": (X.T @ (X @ change)).float()})

    def update_problem(self, server: Server, layout: Layout, update: Tensor, message: Tree) -> str | None:
        """Refuse a change of outputs that is larger than the update explains."""
        change = message.get("change")
        if change is None:
            return None
        views = layout.views(update)
        weight, bias = (views[name].double() for name in head_of(layout))
        solution = torch.cat([weight, bias[:, None]], 1).T
        if change.shape != solution.shape:
            return "its change of outputs has another shape than the head"
        return change_problem(_positive(server.extra["moments"]), change.double(), solution)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Merge the heads; the rule is used for the report alone."""
        combined, layout = self.aggregate(replies), replies.layout
        kept = set(replies.clients) - set(combined.report.rejected)
        changes = [m["change"] for c, m in zip(replies.clients, replies.messages, strict=True) if c in kept]
        damped = _positive(server.extra["moments"])
        step = torch.cholesky_solve(
            sum_of([change.double() for change in changes]), torch.linalg.cholesky(damped)
        )
        names = head_of(layout)
        moved = set_head(torch.zeros_like(server.weights), layout, names, step[:-1].T, bias=step[-1])
        update = layout.shared_parameters(moved)
        return replace(server, weights=server.weights + moved), replace(combined, update=update)


def _positive(moments: Tensor) -> Tensor:
    """Give the matrix X'X of all clients, made positive definite."""
    A = symmetric(moments)
    return A + SAFE * A.diagonal().sum() * torch.eye(len(A)).to(A)
