"""Methods that change the weights or the length of the average: FedNova, FedExP, FedDisco and GA."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server, shares
from fedld.methods.features import BATCH


@dataclass(frozen=True)
class FedNova(Method):
    """Normalised averaging: a client that took more steps does not count for more.

    x <- x + sum_i p_i (tau_eff / tau_i) g_i with tau_eff = sum_i p_i tau_i; tau_i is the number of local
    steps, or with momentum the sum of the gradients' weights (|a_i|_1 of the paper). Adam's steps count as
    one each. Rates by client are not evened out: tau_i is in units of the client's own rate.
    """

    card: ClassVar[Card] = Card("FedNova", "Wang et al. 2020", communication="a number up")

    def client_update(self, client: LocalClient) -> Reply:
        """Train as FedAvg, and send tau_i."""
        client.train(self.loss)
        tau = client.rate_sum / client.rate
        return client.reply(message={"tau": torch.tensor(tau, dtype=torch.float64)})

    def aggregate(self, replies: Replies) -> Aggregate:
        """Apply the rule to updates of one common length of training."""
        tau = torch.stack([message["tau"] for message in replies.messages])
        factor = (replies.p @ tau / tau).to(replies.updates.dtype)
        updates = replies.updates.clone()
        replies.layout.shared_parameters(updates).mul_(factor[:, None])
        return super().aggregate(replace(replies, updates=updates))


@dataclass(frozen=True)
class FedExP(Method):
    """Extrapolation: the further apart the clients' updates, the longer the server's step.

    x <- x + eta Delta  with  eta = max(1, sum_i p_i |Delta_i|^2 / (2 (|Delta|^2 + epsilon)))

    The iterates swing around their limit, so the global model is the mean of the last two (Sec. 3.3); clients
    train from the last.
    """

    epsilon: float = 1e-3

    card: ClassVar[Card] = Card("FedExP", "Jhunjhunwala et al. 2023", communication="a model down (iterate)")
    starts_from_global: ClassVar[bool] = False

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store the first iterate."""
        return Server(weights, {"iterate": weights.clone()})

    def broadcast(self, server: Server) -> Tree:
        """Send the last iterate, from which clients start."""
        return {"weights": server.extra["iterate"]}

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step by length eta from the last iterate; the global model lies half way."""
        combined = self.aggregate(replies)
        longer = combined.scaled(self.extrapolation(replies, combined.update))
        last, d = server.extra["iterate"], replies.layout.shared
        iterate = self.step(replace(server, weights=last), replies, longer.update).weights
        weights = iterate.clone()
        weights[:d] = (last[:d] + iterate[:d]) / 2
        return Server(weights, {"iterate": iterate}), longer

    def extrapolation(self, replies: Replies, update: Tensor) -> float:
        """Compute eta, the server's step size."""
        squares = replies.gradients.double().square().sum(1)
        length = update.double().square().sum() + self.epsilon
        return max(1.0, (replies.p @ squares / (2 * length)).item())


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
        """Train as FedAvg, and send the discrepancy: how uneven the client's labels are."""
        client.train(self.loss)
        # The network knows the number of classes; in eval mode it learns nothing from this batch.
        batch = client.context(*next(client.samples.in_order(1))).teacher
        return client.reply(message={"discrepancy": discrepancy(client.disclosed(batch.class_counts))})

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step as FedAvg, with the weights of this round's clients changed."""
        discrepancies = replies.stack("discrepancy")
        share = discrepancies / discrepancies.sum() if discrepancies.any() else discrepancies
        weights = replies.p - self.a * share + self.b
        return super().server_update(server, replies.weighted(weights if weights.gt(0).any() else replies.p))


def discrepancy(counts: Tensor) -> Tensor:
    """Compute KL(counts / n | uniform), from 0 to log C; 0 where a site sends the count of no class.

    >>> discrepancy(torch.tensor([5, 5])).item(), round(discrepancy(torch.tensor([9, 0])).item(), 4)
    (0.0, 0.6931)
    """
    if not counts.any():
        return torch.zeros((), dtype=torch.float64)
    share = counts.double() / counts.sum()
    divergence: Tensor = torch.special.xlogy(share, share * len(share)).sum()
    return divergence


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
        """Store the weights of all clients."""
        return Server(weights, {"a": shares(sizes, self.client_weights)})

    def client_update(self, client: LocalClient) -> Reply:
        """Train as FedAvg, with the client's loss before and after training."""
        before = self.mean_loss(client)
        gap = before - client.state.get("after", before)
        client.train(self.loss)
        return client.reply(message={"gap": gap}, state={"after": self.mean_loss(client)})

    @torch.no_grad()
    def mean_loss(self, client: LocalClient) -> Tensor:
        """Average the objective over all of the client's samples, in eval mode."""
        client.model.eval()
        total = torch.zeros((), dtype=torch.float64)
        for images, labels in client.samples.in_order(BATCH):
            total += len(labels) * self.loss(client.context(images, labels)).double().cpu()
        return total / len(client.samples)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Compute new weights from the gaps, then step as FedAvg with them."""
        a, here = server.extra["a"].clone(), replies.rows
        gap = replies.stack("gap")
        if gap.any():
            a[here] = (a[here] + self.d / len(a) * gap / gap.abs().max()).clamp(0, 1)
            a = a / a.sum()
        server = replace(server, extra={"a": a})
        return super().server_update(server, replies.weighted(a[here]))
