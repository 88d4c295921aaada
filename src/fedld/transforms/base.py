"""What a transform is: a step on the way of a client's update to the server, the same on every engine.

The contract:

1. A message is a tree of tensors. Training makes `{"parameters": (d,), "buffers": (b,)}`: the change of the
   shared parameters and the values of the shared buffers. The first transform of a chain gets this message,
   every other one the message of the transform before it.
2. `encode` runs at the client, `decode` at the server, in reverse order: after the last `decode` the message
   has `parameters` and `buffers` again, which the method and the records take for the client's update.
3. Shapes and dtypes of a message depend on the layout alone. The server refuses a message of another form
   before it decodes it, and the records count these bytes.
4. A client may keep tensors from one of its rounds to the next (error feedback): `encode` returns them beside
   the message and finds them in `Sender.state`. A client with a refused reply keeps its old state.
5. Randomness comes from `Sender.generator`, so every engine gives the same bits.
6. A transform with `sums_only = True` comes last and shows the server nothing but sums: it has `total` in
   place of `decode`, for updates and for the entries of messages that a method needs as sums. What needs
   single updates is then refused before the run, and the records leave out what cannot be known.
7. One that `opens_gram` as well shows the Gram matrix of the updates' sketches, so that rules of inner
   products work: it has `combine` for the updates of a round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.seeds import torch_generator

PARAMETERS, BUFFERS = "parameters", "buffers"
STATE = "transform."
"""Keys of a client's state that begin so belong to transforms; its method does not see them."""


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who encodes: the client, the round, and what the transform kept of the client's last round.

    weight: how much the client counts in a mean: its training samples, or 1 where clients count alike
    """

    client: str
    round: int
    seed: int
    layout: Layout
    weight: float = 1.0
    state: Tree = field(default_factory=dict)

    def generator(self, purpose: str) -> torch.Generator:
        """Make the generator of a purpose, which depends on seed, round and client."""
        return torch_generator(self.seed, "transform", purpose, self.round, self.client)


@dataclass(frozen=True)
class SummedEntry:
    """How an entry of messages is added up.

    bound: largest magnitude of one of its numbers, which all participants know
    weighted: whether it is multiplied by the client's weight
    """

    bound: float
    weighted: bool = True


UPDATE_ENTRIES = {PARAMETERS: SummedEntry(2.0**10), BUFFERS: SummedEntry(2.0**30)}
"""The entries of an update; counters of batches are among the buffers."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """Sums over clients, by entry, in float64.

    clients: the clients with messages in the sums
    weight: the sum of their w_i
    sums: of w_i times a weighted entry, of an entry that is not weighted as it is
    """

    clients: tuple[str, ...]
    weight: float
    sums: Tree

    def means(self, entries: Mapping[str, SummedEntry]) -> Tree:
        """Give the weighted means of weighted entries, and the sums of the others."""
        return {key: s / self.weight if entries[key].weighted else s for key, s in self.sums.items()}


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Combination:
    """How updates are combined by their Gram matrix.

    coefficients: (K, p) -> c, the rule
    sketch: (vector, length, seed) -> its sketch
    """

    coefficients: Callable[[Array, Array], Array]
    sketch: Callable[[npt.NDArray[np.floating], int, int], npt.NDArray[np.floating]]


@dataclass(frozen=True, kw_only=True)
class CombinedTotal(Total):
    """Sums over clients, of which that of the parameters is over c_i times a client's.

    matrix: K of the sketches, in the order of `clients`
    shares: p
    length, seed: of the sketch
    sent, delivered: bytes of the Gram matrix, from all clients and to them
    """

    matrix: Array
    shares: Array
    length: int
    seed: int
    sent: int
    delivered: int


@dataclass(frozen=True)
class UpdateTransform:
    """Base of all transforms, and by itself one that changes nothing."""

    name: ClassVar[str] = "none"
    sums_only: ClassVar[bool] = False
    opens_gram: ClassVar[bool] = False
    least_parameters: ClassVar[int] = 1
    """With `opens_gram`: the shortest update that can be sketched."""
    clients: ClassVar[tuple[int, int]] = (1, 10**9)
    """With `sums_only`: fewest and most clients of a round."""

    def encode(self, message: Tree, sender: Sender) -> tuple[Tree, Tree]:
        """Turn a message into the one that travels on.

        Args:
            message: What the transform before made, or training itself.
            sender: The client and what this transform kept of the client's last round.

        Returns:
            The new message, and what the client keeps for its next round.
        """
        return message, {}

    def decode(self, message: Tree, layout: Layout) -> Tree:
        """Turn a client's message back into one of the form that `encode` was given.

        Args:
            message: what the client sent.
            layout: where the model's tensors lie in its vector.

        Returns:
            The message that `encode` was given, up to what the transform loses.
        """
        return message

    def total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> Total:
        """Add up the messages of all clients; for transforms with `sums_only`.

        Args:
            messages: By client, with the same entries in the same shapes.
            weights: How much each client counts.
            entries: How each entry is added up.

        Returns:
            The sums, and the clients that are in them.
        """
        raise NotImplementedError

    def combine(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
        by: Combination,
    ) -> CombinedTotal:
        """Combine the parameters of all clients by their Gram matrix, and add up the other entries.

        For transforms with `opens_gram`.

        Args:
            messages: By client, with the same entries in the same shapes, `parameters` among them.
            weights: How much each client counts.
            entries: How each entry is added up; the parameters with the rule's coefficients.
            by: The rule and the sketch.

        Returns:
            The sums, and what was opened of the parameters.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Chain:
    """The transforms of a run, in the order in which a client applies them."""

    transforms: Sequence[UpdateTransform] = ()

    def __bool__(self) -> bool:
        return bool(self.transforms)

    @property
    def sums_only(self) -> UpdateTransform | None:
        """The transform that shows the server sums alone, if there is one."""
        return next((transform for transform in self.transforms if transform.sums_only), None)

    def encode(self, update: Tensor, sender: Sender) -> tuple[Tree, Tree]:
        """Apply the client side to an update.

        Args:
            update: Vector of the whole layout.
            sender: The client; its state has the keys of the whole chain.

        Returns:
            The message that travels, and the state to keep (keys begin with `transform.`).
        """
        layout = sender.layout
        message: Tree = {
            PARAMETERS: layout.shared_parameters(update).cpu(),
            BUFFERS: layout.shared_buffers(update).cpu(),
        }
        kept: Tree = {}
        for place, transform in enumerate(self.transforms):
            prefix = f"{STATE}{place}."
            kept_before = {
                key.removeprefix(prefix): t for key, t in sender.state.items() if key.startswith(prefix)
            }
            message, new = transform.encode(message, _with_state(sender, kept_before))
            kept |= {prefix + key: tensor for key, tensor in new.items()}
        return message, kept

    def decode(self, message: Tree, layout: Layout) -> Tree:
        """Apply the server side to a client's message: `parameters` and `buffers`.

        Raises:
            FedLDError: The message does not decode to an update of this layout.
        """
        for transform in reversed(self.transforms):
            message = message if transform.sums_only else transform.decode(message, layout)
        lengths = {PARAMETERS: layout.shared, BUFFERS: layout.shared_end - layout.trainable}
        for key, length in lengths.items():
            if key not in message or message[key].shape != (length,):
                raise FedLDError(f"its update has no '{key}' of {length} numbers after decoding")
        return message

    def template(self, layout: Layout) -> Tree:
        """Make a message of the form that all messages of a run have, from an update of zeros.

        Raises:
            FedLDError: The transforms do not fit together.
        """
        zeros = torch.zeros(layout.size)
        try:
            message, _ = self.encode(zeros, Sender(client="", round=0, seed=0, layout=layout))
        except KeyError as error:
            names = ", ".join(transform.name for transform in self.transforms)
            raise FedLDError(
                f"the transforms {names} do not fit together: one needs {error} of the message before it"
            ) from None
        self.decode(message, layout)
        return message

    def check(self, layout: Layout) -> None:
        """Refuse a chain that cannot work, before the run."""
        for transform in self.transforms[:-1]:
            if transform.sums_only:
                raise FedLDError(f"transform '{transform.name}' shows the server sums alone: put it last")
        if self.transforms:
            self.template(layout)

    def check_message(self, message: Tree, template: Tree) -> None:
        """Refuse a message of another form than the run's messages have."""
        forms = [{key: (tuple(t.shape), t.dtype) for key, t in tree.items()} for tree in (message, template)]
        if forms[0] != forms[1]:
            raise FedLDError("its update has another form than the run's transforms make")


def _with_state(sender: Sender, state: Tree) -> Sender:
    return Sender(
        client=sender.client,
        round=sender.round,
        seed=sender.seed,
        layout=sender.layout,
        weight=sender.weight,
        state=state,
    )
