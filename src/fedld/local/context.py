"""A batch in its context: what a client knows when it computes a loss, each part made when asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedld.layout import FlatModel
from fedld.models import as_model


@dataclass(frozen=True)
class Context:
    """A batch, the network that sees it, and what the client knows beside it.

    Only what a loss uses is computed: logits take one forward pass, features come from the same pass if they
    are used first, the teacher takes one more pass without gradients.

    Attributes:
        flat: the network as one vector.
        images: the batch's samples.
        labels: their labels.
        client_labels: labels of all training samples of the client.
        incoming: the weights that the client received.
        round: number of the round.
        weights: other weights than the network's; see `seen_by`.
        class_weights: factors of the losses by class (C,), where classes do not weigh alike.
    """

    flat: FlatModel
    images: Tensor
    labels: Tensor
    client_labels: Tensor
    incoming: Tensor
    round: int
    weights: Tensor | None = None  # other weights than the network's own; see `seen_by`
    class_weights: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The network in training."""
        return self.flat.model

    @cached_property
    def logits(self) -> Tensor:
        """Logits (N, C), in float32 or better also where the network computes in bfloat16."""
        with self._network():
            if "features" in vars(self):
                return _widened(as_model(self.model).head(self.features))
            return _widened(self.flat.model(self.images))

    @cached_property
    def features(self) -> Tensor:
        """Features (N, F), the input of the head; refused for a network that has no such parts."""
        with self._network():
            return _widened(as_model(self.model).embed(self.images))

    @cached_property
    def class_counts(self) -> Tensor:
        """How many training samples of every class the client has, (C,)."""
        counts = torch.bincount(self.client_labels, minlength=self.logits.shape[1])
        return counts.to(self.logits.device, self.logits.dtype)

    @cached_property
    def teacher(self) -> "Context":
        """The batch as the incoming model sees it: `teacher.logits`, `teacher.features`."""
        return self.seen_by(self.incoming)

    def seen_by(self, weights: Tensor) -> "Context":
        """View the batch through a model with other weights, in eval mode and without gradients.

        Args:
            weights: a model as one vector.

        Returns:
            The context of that model.
        """
        return replace(self, weights=weights)

    def with_logits(self, logits: Tensor) -> "Context":
        """Replace the logits by some that were computed in another way.

        Args:
            logits: (N, C) logits.

        Returns:
            The same batch with these logits.
        """
        other = copy(self)
        vars(other)["logits"] = _widened(logits)
        return other

    @contextmanager
    def _network(self) -> Iterator[None]:
        """The network itself, or for a moment the frozen one with other weights."""
        if self.weights is None:
            yield
            return
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), self.flat.holding(self.weights):
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _widened(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
