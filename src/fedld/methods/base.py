"""What a federated method is: a value that says what a client does and what the server does.

A method never learns where its clients run. Server state, client state and messages are trees of tensors,
so checkpoints, worker processes and Flower records come for free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from fedld.aggregation import (
    Aggregate,
    Bounds,
    MatrixSource,
    Mean,
    Rule,
    Trial,
    Updates,
    aggregate,
    column_specs,
    combine_updates,
    location_of,
)
from fedld.aggregation.inputs import as_sketch, as_weights
from fedld.data import Federation
from fedld.layout import Layout, Tree
from fedld.local import Context, LocalClient, Objective, Reply


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
class MessageSum:
    """An entry of clients' messages of which the server needs the sum alone.

    bound: largest magnitude of a number; with `per_sample` for each of a client's samples
    weighted: whether the sum is over w_i times the entry (`client_weights`), or over the entry as it is
    """

    bound: float
    weighted: bool = True
    per_sample: bool = False


ClientWeights = Literal["size", "uniform"]
"""How much a client counts: p_i = n_i / n as in Eq. 1, or all alike."""


def shares(sizes: Sequence[float], by: ClientWeights = "size") -> Tensor:
    """Compute p over some clients, summing to one.

    >>> shares([30, 10]).tolist(), shares([30, 10], "uniform").tolist()
    ([0.75, 0.25], [0.5, 0.5])
    """
    counts = torch.tensor(sizes if by == "size" else [1] * len(sizes), dtype=torch.float64)
    return counts / counts.sum()


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What some clients sent, and how much each of them counts (the method's `client_weights`).

    `rows` are the clients' places in what the server keeps of every client (`init`, `personal`).
    Where the server sees `summed` messages alone, there is one message, of one sender: the weighted mean of
    weighted entries and the sum of the others (`Method.message_sums`). `rows` are those of the clients in it.
    """

    clients: tuple[str, ...]
    rows: list[int]
    sizes: tuple[float, ...]
    messages: Sequence[Tree]
    client_weights: ClientWeights = "size"
    summed: bool = False

    @property
    def p(self) -> Tensor:
        """Weights over these clients."""
        return shares(self.sizes, self.client_weights)

    def weighted(self, weights: Tensor) -> Self:
        """Replace the clients' weights; zeros become 1e-12 of the largest, as rules need positive weights."""
        floor = 1e-12 * weights.max().item()
        return replace(self, sizes=tuple(weights.clamp(min=floor).tolist()), client_weights="size")

    def rows_with(self, key: str) -> list[int]:
        """Select the rows of the clients that sent an entry."""
        if self.summed:
            return self.rows if any(key in message for message in self.messages) else []
        return [row for row, m in zip(self.rows, self.messages, strict=True) if key in m]

    def over_all(self, p: Tensor, values: Tensor) -> Tensor:
        """Sum p_i times the values of these clients (m, d), where `p` are the weights of all clients.

        A mean over clients, weighted in proportion to p, stands for values that are known as a sum alone.
        """
        weights = p[self.rows]
        return (weights.sum(0, keepdim=True) if self.summed else weights) @ values

    def stack(self, key: str) -> Tensor:
        """Stack one entry of the messages, a row for each client."""
        return torch.stack([message[key] for message in self.messages])

    def mean(self, key: str) -> Tensor:
        """Average one entry of the messages by the clients' weights."""
        stacked = self.stack(key)
        mean: Tensor = torch.tensordot(self.p.to(stacked.dtype), stacked, dims=1)
        return mean


@dataclass(frozen=True, kw_only=True)
class Replies(Messages):
    """What the server accepted in a round after training, client by client.

    `updates` is the (m, D) matrix; its first `layout.shared` columns are G of the paper, row by row. Clients
    with a refused reply are not among them: a method cannot see what they sent.
    """

    layout: Layout
    updates: Tensor
    steps: tuple[float, ...]
    trial: Trial | None = None
    """What the clients measured of the candidate steps that the rule proposed; None before they are asked."""
    combined: Aggregate | None = None
    """What the rule made of updates that the server does not see; then `updates` is this one row."""

    @property
    def gradients(self) -> Tensor:
        """The updates of the shared parameters, (m, d)."""
        return self.layout.shared_parameters(self.updates)


@dataclass(frozen=True)
class Method:
    """Base of all methods, and by itself FedAvg: a subclass replaces the steps that differ.

    Attributes:
        objective: what a client minimises on a batch; margin control can be put around any method.
        rule: how the server combines updates.
        granularity: one Gram matrix per "model", "layer" or "tensor".
        client_weights: whether clients count by "size" (p_i = n_i / n, Eq. 1) or alike ("uniform").
        max_weight: largest share of one client (see `aggregate`).
        max_update_ratio: a client whose update is longer than so many times the median is refused before the
            method sees the round's replies.

    A method that halves every learning rate of FedAvg's clients:

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Halved(Method):
    ...     def client_update(self, client):
    ...         client.train(self.loss, lr=client.training.lr / 2)
    ...         return client.reply()
    >>> Halved().rule
    Mean()
    """

    objective: Objective = field(default_factory=Objective)
    rule: Rule = field(default_factory=Mean)
    granularity: str = "model"
    client_weights: ClientWeights = "size"
    max_weight: float | None = None
    max_update_ratio: float | None = None

    card: ClassVar[Card]
    personalised: ClassVar[bool] = False
    has_global: ClassVar[bool] = True
    sums_suffice: ClassVar[bool] = False  # the server uses the rule's aggregate and `message_sums` alone
    message_sums: ClassVar[Mapping[str, MessageSum]] = {}  # entries that are only needed as sums
    calibrates: ClassVar[bool] = False  # whether an exchange with all clients follows the last round
    reads_features: ClassVar[bool] = False  # of the incoming and the trained model: losses use the same pass
    starts_from_global: ClassVar[bool] = True  # a client's loss before training is then the global model's
    second_moments: ClassVar[bool] = False  # clients send X'X of the head's inputs, which need a frozen trunk
    needs_linear: ClassVar[str] = ""  # why it needs steps that are sums of gradients at one rate, if it does

    def federation(self, federation: Federation) -> Federation:
        """Choose the data that this method trains on; `central` pools the clients here.

        Args:
            federation: the clients' data.

        Returns:
            The federation to train on.
        """
        return federation

    def check(self, model: nn.Module) -> None:
        """Refuse a model that this method cannot train, before the run begins.

        Args:
            model: the network.

        Raises:
            FedLDError: the model lacks what the method needs.
        """

    def adapt(self, model: nn.Module) -> nn.Module:
        """Add what this method needs to a model, such as a second head.

        Args:
            model: the network.

        Returns:
            The network to train.
        """
        return model

    def private(self, model: nn.Module) -> frozenset[str]:
        """Name the parameters and buffers that stay with each client.

        Args:
            model: the network.

        Returns:
            Names as in `model.named_parameters()` and `model.named_buffers()`.
        """
        return frozenset()

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Make the server's state before the first round.

        Args:
            weights: the initial model as one vector.
            layout: where its tensors lie in the vector.
            sizes: samples of every client, row by row.

        Returns:
            The server's state.
        """
        return Server(weights)

    @staticmethod
    def zero_update(weights: Tensor, layout: Layout) -> Tensor:
        """Make zeros as long as an update, for a server state such as momentum in `init`.

        `weights` also hold private parameters and buffers, so `zeros_like(weights)` is too long for that.

        Args:
            weights: the model as one vector.
            layout: where its tensors lie in the vector.

        Returns:
            A vector of zeros.
        """
        return torch.zeros_like(layout.shared_parameters(weights))

    def broadcast(self, server: Server) -> Tree:
        """Make what every client gets beside the global weights.

        Args:
            server: the server's state.

        Returns:
            Tensors by name; clients find them in `client.message`.
        """
        return {}

    def personal(self, server: Server, row: int) -> Tree:
        """Make what one client gets for itself.

        Args:
            server: the server's state.
            row: the client's position in what the server keeps of every client.

        Returns:
            Tensors by name; `weights` replace the global ones, `private` the client's private parameters.
        """
        return {}

    @property
    def prepares(self) -> bool:
        """Whether a round begins with an exchange of its own: `prepare` at the clients, then `gather`."""
        return False

    def prepare(self, client: LocalClient) -> Tree:
        """Compute what a client sends before the round's training.

        Args:
            client: the client; its model is the incoming one.

        Returns:
            Tensors by name, for `gather`.
        """
        raise NotImplementedError

    def prepared_lengths(self, message: Tree) -> dict[str, float]:
        """Compute lengths in a message of `prepare` that `max_update_ratio` bounds among clients.

        Args:
            message: what a client's `prepare` returned.

        Returns:
            Lengths by name.
        """
        return {}

    def message_problem(self, message: Tree, samples: int) -> str | None:
        """Check a message from another machine before it is used.

        Args:
            message: what the client sent.
            samples: number of samples that the client described.

        Returns:
            Why a client with so many samples cannot have such a message; None if it can.
        """
        return None

    def update_problem(self, server: Server, layout: Layout, update: Tensor, message: Tree) -> str | None:
        """Check that an update and the message beside it belong together.

        Args:
            server: the server's state.
            layout: where the model's tensors lie in its vector.
            update: the client's update.
            message: what the client sent beside it.

        Returns:
            Why they do not belong together; None if they do.
        """
        return None

    def calibrate(self, server: Server, messages: Messages) -> Server:
        """Make the final server state after the last round, for methods with `calibrates`.

        Args:
            server: the server's state after the last round.
            messages: what `prepare` returned at all clients.

        Returns:
            The final state.
        """
        raise NotImplementedError

    def gather(self, server: Server, messages: Messages) -> Server:
        """Take in what `prepare` returned; the weights stay as they are.

        Args:
            server: the server's state.
            messages: the clients' messages.

        Returns:
            The server's state, from which `broadcast` makes this round's message.
        """
        raise NotImplementedError

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the client's samples.

        Args:
            client: the client with its incoming model, samples, state and the server's message.

        Returns:
            The update and what goes with it.
        """
        client.train(self.loss)
        return client.reply(statistics=self.has_global)

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Make the next server state from this round's replies.

        Args:
            server: the server's state.
            replies: the accepted replies; refused clients are not among them.

        Returns:
            The next state, and the aggregate with its report.
        """
        combined = self.aggregate(replies)
        return self.step(server, replies, combined.update), combined

    def message_bytes(self, layout: Layout) -> int:
        """Bound the bytes of one client's message beyond a few models.

        Args:
            layout: where the model's tensors lie in its vector.

        Returns:
            A number of bytes.
        """
        return 0

    def choices(self, server: Server) -> dict[str, float]:
        """Name the numbers that the server has chosen by itself, for the round's record.

        Args:
            server: the server's state.

        Returns:
            Numbers by name.
        """
        return {}

    def loss(self, context: Context) -> Tensor:
        """Compute what a client minimises on a batch: the objective, unless a method adds to it.

        Args:
            context: the batch with what the client knows.

        Returns:
            The loss, a scalar with a gradient.
        """
        return self.objective.loss(context)

    @property
    def directions(self) -> int:
        """How many directions the candidate steps of a round are made of; 0 where nothing is measured."""
        return len(self.rule.bases())

    def _compared(self, replies: Replies) -> Aggregate:
        """Give an empty update, and a report of how far the clients' steps lie apart."""
        steps = replies.updates[:, : replies.layout.trainable]
        compared = aggregate(
            steps, replies.sizes, self.rule, weights=replies.client_weights, clients=replies.clients
        )
        return replace(compared, update=replies.gradients.sum(0))

    def aggregate(self, replies: Replies) -> Aggregate:
        """Apply the rule to the clients' updates.

        Args:
            replies: the accepted replies.

        Returns:
            The aggregate; where all parameters are private it is empty and its report compares the clients.
        """
        if replies.combined is not None:
            return replies.combined
        if not replies.layout.shared:
            return self._compared(replies)
        source = MatrixSource(replies.gradients, column_specs(replies.layout.tensors))
        updates = Updates(
            source=source,
            clients=replies.clients,
            p=as_weights(replies.sizes, replies.client_weights, replies.clients),
            granularity=self.granularity,
            sketch=as_sketch("auto", len(replies.clients), replies.layout.shared, self.granularity),
        )
        return combine_updates(
            updates,
            self.rule,
            trial=replies.trial,
            propose=replies.trial is None,
            bounds=Bounds(self.max_weight),
        )

    def buffers(self, replies: Replies) -> Tensor:
        """Combine the clients' shared buffers.

        Args:
            replies: the accepted replies.

        Returns:
            The buffers of the next global model.
        """
        return self._combine_buffers(replies, replies.layout.shared_buffers(replies.updates), private=False)

    def _combine_buffers(self, replies: Replies, values: Tensor, *, private: bool) -> Tensor:
        """Average the clients' buffers (m, b), or take their median if the rule is robust."""
        p = replies.p
        mean = location_of(self.rule, values, p / p.sum())
        return replies.layout.count_batches(mean, values, private=private)

    def step(self, server: Server, replies: Replies, update: Tensor) -> Server:
        """Add the aggregate to the parameters and average the buffers.

        Args:
            server: the server's state.
            replies: the accepted replies.
            update: the aggregate.

        Returns:
            The state with the next model.
        """
        layout, weights = replies.layout, server.weights.clone()
        layout.shared_parameters(weights).add_(update)
        layout.shared_buffers(weights).copy_(self.buffers(replies))
        if "statistics" in replies.messages[0]:  # each client's own, where they stay with the clients
            mean = self._combine_buffers(replies, replies.stack("statistics"), private=True)
            layout.private_buffers(weights).copy_(mean)
        return replace(server, weights=weights)
