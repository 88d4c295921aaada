"""Secure sums and Gram matrices as transforms: the server of a run on one machine sees no single update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedld.layout import Tree
from fedld.privacy.context import LEAST_SITES, MOST_SITES, GramContext
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.gram import combination_digest, length_exponent, sketch_bound
from fedld.privacy.simulation import agreed_coefficients, secure_gram, secure_sum
from fedld.transforms.base import (
    PARAMETERS,
    Combination,
    CombinedTotal,
    Sender,
    SummedEntry,
    Total,
    UpdateTransform,
)

BUCKETS = 64
"""A sketch has a multiple of so many numbers."""
LONGEST_SKETCH = 1024
"""Numbers of a sketch, at most: inner products are then off by about 3 % of the lengths."""


@dataclass(frozen=True)
class SecureSummation(UpdateTransform):
    """Fixed point modulo 2^64, masks, shares and the five messages of a secure sum, among simulated sites.

    With 64 bits a parameter is rounded to a multiple of about 1e-12 and clients may have any weights.
    """

    name: ClassVar[str] = "secure sum"
    sums_only: ClassVar[bool] = True
    clients: ClassVar[tuple[int, int]] = (LEAST_SITES, MOST_SITES)

    def encode(self, message: Tree, sender: Sender) -> tuple[Tree, Tree]:
        """Give the numbers 64 bits each, as they travel."""
        return {key: tensor.double() for key, tensor in message.items()}, {}

    def total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> Total:
        """Sum the messages by the protocol itself, all entries in one vector.

        Raises:
            FedLDError: there are fewer than three clients, or a number is beyond its bound.
        """
        return self._total(messages, weights, entries)

    def _total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
        settings: str | None = None,
    ) -> Total:
        """Sum the messages; `settings` is the digest of what the clients agreed on before."""
        form = next(iter(messages.values()), {})
        present = [key for key in entries if key in form and form[key].numel()]
        code = FixedPoint(
            bits=64,
            sites=len(messages),
            largest_weight=max((int(weight) for weight in weights.values()), default=1),
            segments=tuple(
                Segment(key, form[key].numel(), entries[key].bound, entries[key].weighted) for key in present
            ),
        )
        places = _places(messages)
        vectors = {
            place: np.concatenate([messages[client][key].double().flatten().numpy() for key in present])
            for place, client in places.items()
        }
        counts = {place: int(weights[client]) for place, client in places.items()}
        opened = secure_sum(vectors, counts, code, settings=settings)
        clients = tuple(places[place] for place in opened.survivors)
        parts = torch.split(torch.from_numpy(opened.total), [form[key].numel() for key in present])
        sums = {key: tensor.double() for key, tensor in form.items() if key in entries}  # the empty ones
        sums |= {key: part.view(form[key].shape) for key, part in zip(present, parts, strict=True)}
        return Total(clients=clients, weight=float(sum(weights[c] for c in clients)), sums=sums)


@dataclass(frozen=True)
class SecureCombination(SecureSummation):
    """The Gram matrix of the updates' sketches, a rule's coefficients from it, and the secure sum with these.

    Every simulated site opens the matrix, computes the coefficients c again and compares them with the
    published ones. Then it multiplies its update by its own c_i, which may be negative, and adds it to a
    secure sum that is bound to the matrix and to c. The largest |c_i| times the bound of an update is the
    public bound of that sum.
    """

    name: ClassVar[str] = "secure gram"
    opens_gram: ClassVar[bool] = True
    least_parameters: ClassVar[int] = 8 * BUCKETS
    clients: ClassVar[tuple[int, int]] = (GramContext.least_sites, GramContext.most_sites)

    def combine(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
        by: Combination,
    ) -> CombinedTotal:
        """Open the Gram matrix, agree on the coefficients, and sum.

        Raises:
            FedLDError: there are fewer than five clients, a number is beyond its bound, or fewer than three
                coefficients matter.
        """
        places = _places(messages)
        vectors = {place: messages[client][PARAMETERS].double().numpy() for place, client in places.items()}
        length = sketch_length(len(next(iter(vectors.values()))))
        bound = sketch_bound(length_exponent(vector) for vector in vectors.values())
        gram = secure_gram(vectors, by.sketch, length=length, bound=bound)
        counts = np.array([weights[client] for client in messages], np.float64)
        shares = counts / counts.sum()
        c = agreed_coefficients(gram, shares, by.coefficients)
        scaled = {
            client: {**message, PARAMETERS: float(c_i) * message[PARAMETERS].double()}
            for (client, message), c_i in zip(messages.items(), c, strict=True)
        }
        largest = entries[PARAMETERS].bound * float(np.abs(c).max())
        bounded = {**entries, PARAMETERS: SummedEntry(largest, weighted=False)}
        total = self._total(scaled, weights, bounded, combination_digest(gram.opened, c))
        return CombinedTotal(
            clients=total.clients,
            weight=total.weight,
            sums=total.sums,
            matrix=gram.matrix,
            shares=shares,
            length=length,
            seed=gram.seed,
            sent=sum(gram.sent.values()),
            delivered=gram.delivered,
        )


def sketch_length(dimension: int) -> int:
    """Numbers of the sketch of an update: at most an eighth of its own.

    >>> sketch_length(10_000), sketch_length(1_000)
    (1024, 64)
    """
    return min(LONGEST_SKETCH, dimension // 8 // BUCKETS * BUCKETS)


def _places(messages: Mapping[str, Tree]) -> dict[str, str]:
    """Names for the simulated sites, sorted as the clients are."""
    return {f"client{k:04}": client for k, client in enumerate(messages)}
