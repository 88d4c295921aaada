"""What a federated method is: a value that says what a client does and what the server does.

A method never learns where its clients run. Server state, client state and messages are trees of tensors,
so checkpoints, worker processes and Flower records come for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedld.aggregation import Aggregate, Mean, Rule, aggregate
from fedld.data import Federation
from fedld.layout import Layout, Tree
from fedld.local import LocalClient, Objective, Reply


@dataclass(frozen=True)
class Card:
    """What `fedld methods` prints: where a method comes from and what it needs."""

    title: str
    paper: str
    personal: str = "-"
    communication: str = "-"
    batchnorm: bool = True
    sampling: bool = True


@dataclass(frozen=True)
class Server:
    """The global model's vector (its private parts: what an unseen client starts from) and extras."""

    weights: Tensor
    extra: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class Replies:
    """What the server received in a round, client by client.

    `updates` is the (m, D) matrix whose first `layout.shared` columns are G of the paper, row by row.
    """

    layout: Layout
    clients: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    updates: Tensor
    messages: Sequence[Tree]
    steps: tuple[float, ...]

    @property
    def p(self) -> Tensor:
        """Weights n_i / n over the clients of this round."""
        sizes = torch.tensor(self.sizes, dtype=torch.float64)
        return sizes / sizes.sum()

    @property
    def gradients(self) -> Tensor:
        """The updates of the shared parameters, (m, d)."""
        return self.updates[:, : self.layout.shared]

    def mean(self, key: str, p: Tensor | None = None) -> Tensor:
        """Weighted mean (by size unless told) of one entry of the clients' messages."""
        weights = self.p if p is None else p
        stacked = torch.stack([message[key] for message in self.messages])
        mean: Tensor = torch.tensordot(weights.to(stacked.dtype), stacked, dims=1)
        return mean


@dataclass(frozen=True)
class Method:
    """Base of all methods, and by itself FedAvg: every step below may be replaced.

    `objective` and `rule` are parts of every method, so margin control or the principal rule can be put
    around any of them.
    """

    objective: Objective = field(default_factory=Objective)
    rule: Rule = field(default_factory=Mean)
    granularity: str = "model"

    card: ClassVar[Card]
    personalised: ClassVar[bool] = False
    has_global: ClassVar[bool] = True

    def federation(self, federation: Federation) -> Federation:
        """The federation this method trains on; `central` pools the clients here."""
        return federation

    def check(self, model: nn.Module) -> None:
        """Refuse a model that this method cannot train, before anything runs."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """The model with what this method adds to it."""
        return model

    def private(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters and buffers that stay with each client."""
        return frozenset()

    def init(self, weights: Tensor, layout: Layout, clients: int) -> Server:
        """Server state before the first round."""
        return Server(weights)

    def broadcast(self, server: Server) -> Tree:
        """What every client gets beside the global weights."""
        return {}

    def personal(self, server: Server, client: int) -> Tree:
        """What one client gets for itself; `weights` replace the global, `private` its private parameters."""
        return {}

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the client's samples and reply."""
        client.train(self.loss)
        return client.reply()

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Next server state from this round's replies."""
        combined = self.aggregate(replies)
        return self.step(server, replies, combined.update), combined

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """The objective on the model's logits."""
        return self.judge(model(images), labels)

    def judge(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The objective, in float32 or better also where the network computes in bfloat16."""
        return self.objective(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)

    def aggregate(self, replies: Replies) -> Aggregate:
        """The rule applied to the clients' updates."""
        return aggregate(
            replies.gradients,
            replies.sizes,
            self.rule,
            granularity=self.granularity,
            tensors=replies.layout.tensors,
            clients=replies.names,
        )

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Add the aggregate to the parameters and average the buffers."""
        layout = replies.layout
        weights = server.weights.clone()
        weights[: layout.shared] += update
        weights[layout.buffers] = layout.mean_buffers(replies.updates[:, layout.buffers], replies.p)
        return replace(server, weights=weights)
