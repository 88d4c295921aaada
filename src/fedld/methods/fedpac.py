from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.aggregation import MinNorm
from fedld.layout import Layout, Tree
from fedld.local import Context, LocalClient, Reply
from fedld.methods.base import Card, Method, Replies, Server
from fedld.methods.features import ClassFeatures, by_class
from fedld.models import as_model, head_names


@dataclass(frozen=True)
class FedPAC(Method):
    """Feature alignment and classifier collaboration (Algorithm 1 of the paper).

    Client:  statistics h, v of the incoming model's features; one epoch for the head; then the body, head
             frozen, on the objective + lam * MSE(f, global prototype of y)
    Server:  body by the rule, prototypes weighted by class counts, head_i = sum_j a_j head_j with
             a = argmin a'(diag(v) + D_i D_i')a on the simplex, rows of D_i are h_i - h_j

    A client that is not sampled keeps its last head. The global model has the mean of this round's heads.
    """

    lam: float = 1.0
    head_lr: float = 0.1
    head_epochs: int = 1

    card: ClassVar[Card] = Card(
        "FedPAC",
        "Xu et al. 2023",
        personal="head",
        communication="feature means, prototypes",
    )
    personalised: ClassVar[bool] = True
    reads_features: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)

    def private(self, model: nn.Module) -> frozenset[str]:
        """Name the head, which is aggregated for each client by itself."""
        return frozenset(head_names(as_model(model)))

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Start every client from the same head; there are no prototypes yet."""
        return Server(weights, {"heads": layout.private_parameters(weights).repeat(len(sizes), 1)})

    def broadcast(self, server: Server) -> Tree:
        """Send the global prototypes, and which classes have one."""
        return {key: server.extra[key] for key in ("prototypes", "known") if key in server.extra}

    def personal(self, server: Server, row: int) -> Tree:
        """Send the client's own mixture of heads."""
        return {"private": server.extra["heads"][row]}

    def client_update(self, client: LocalClient) -> Reply:
        """Compute statistics, train head and body, compute prototypes."""
        h, v = statistics(by_class(client))
        head = head_names(as_model(client.model))
        body = [name for name, _ in client.model.named_parameters() if name not in head]
        client.train(self.loss, epochs=self.head_epochs, lr=self.head_lr, only=head)

        def aligned(context: Context) -> Tensor:
            pull = self.alignment(context.features, context.labels, client.message)
            return self.objective.loss(context) + self.lam * pull

        client.train(aligned, only=body)
        class_features = by_class(client)
        head_weights = client.layout.private_parameters(client.weights).clone()
        message = {"h": h, "v": v, "head": head_weights, "counts": class_features.counts}
        message["prototypes"] = class_features.means
        return client.reply(message=message)

    @staticmethod
    def alignment(features: Tensor, labels: Tensor, message: Tree) -> Tensor:
        """Compute the mean squared distance to the global prototypes; 0 for a class without one."""
        if "prototypes" not in message:
            return features.new_zeros(())
        has_prototype = message["known"][labels].bool()[:, None]
        target = torch.where(
            has_prototype, message["prototypes"][labels].to(features.dtype), features.detach()
        )
        return F.mse_loss(features, target)

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Update body, prototypes, and a head for every client of this round."""
        layout, server = replies.layout, super().step(server, replies, update)
        trained = torch.stack([message["head"] for message in replies.messages])
        heads = server.extra["heads"].clone()
        heads[replies.rows] = (head_mixtures(replies).to(trained) @ trained).to(heads.dtype)
        layout.private_parameters(server.weights).copy_(replies.mean("head"))
        return replace(server, extra={"heads": heads, **self._prototypes(server, replies)})

    def _prototypes(self, server: Server, replies: Replies) -> Tree:
        """Average prototypes by class counts; a class without samples in this round keeps its old one."""
        counts = torch.stack([message["counts"] for message in replies.messages])
        means = torch.stack([message["prototypes"] for message in replies.messages])
        total = counts.sum(0)
        new = (counts[:, :, None] * means).sum(0) / total.clamp(min=1)[:, None]
        seen = (total > 0).to(total.dtype)
        old, has_prototype = server.extra.get("prototypes", new), server.extra.get("known", seen)
        return {
            "prototypes": torch.where(total[:, None] > 0, new, old),
            "known": torch.maximum(has_prototype, seen),
        }


def statistics(class_features: ClassFeatures) -> tuple[Tensor, Tensor]:
    """Compute h_k = py_k mu_k and v = (sum_k py_k E|f|^2_k - sum_k |h_k|^2) / n, the mean's variance."""
    n = class_features.counts.sum()
    share = class_features.counts / n
    h = share[:, None] * class_features.means
    return h, (share @ class_features.squares - h.square().sum()) / n


def head_mixtures(replies: Replies) -> Tensor:
    """Compute in row i the weights a_j with which client i mixes the heads of this round's clients."""
    h = torch.stack([message["h"].flatten() for message in replies.messages]).double().numpy()
    v = torch.stack([message["v"] for message in replies.messages]).double().numpy()
    return torch.from_numpy(np.stack([mixture(h - h[i], v) for i in range(len(h))]))


def mixture(D: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    """Minimise a'(diag(v) + DD')a on the simplex: the shortest point of a convex hull, exactly.

    >>> mixture(np.zeros((2, 3)), np.array([1.0, 3.0])).round(6)
    array([0.75, 0.25])
    """
    return MinNorm()(np.diag(v) + D @ D.T, np.full(len(v), 1 / len(v)))
