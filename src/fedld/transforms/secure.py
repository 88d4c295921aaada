"""Secure sums and Gram matrices as transforms: the server of a run sees no single update.

On one machine the sites are simulated. Across sites vectors, bounds and results are the same, and
`fedld.engine.backends.flower` carries the messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
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

BITS = 64
"""Of a number: a parameter is rounded to a multiple of about 1e-12, and clients may have any weights."""
BUCKETS = 64
"""A sketch has a multiple of so many numbers."""
LONGEST_SKETCH = 1024
"""Numbers of a sketch, at most: inner products are then off by about 3 % of the lengths."""


@dataclass(frozen=True)
class SecureSummation(UpdateTransform):
    """Fixed point modulo 2^64, masks, shares and the five messages of a secure sum, among simulated sites."""

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
        largest = max((int(weight) for weight in weights.values()), default=1)
        code = sum_code(form, entries, sites=len(messages), largest_weight=largest)
        places = _places(messages)
        vectors = {place: sum_vector(messages[client], entries) for place, client in places.items()}
        counts = {place: int(weights[client]) for place, client in places.items()}
        opened = secure_sum(vectors, counts, code, settings=settings)
        clients = tuple(places[place] for place in opened.survivors)
        return sum_total(opened.total, clients, form=form, entries=entries, weights=weights)


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
        largest = entries[PARAMETERS].bound * combined_bound(c)
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


def combined_bound(coefficients: npt.NDArray[np.float64]) -> float:
    """Give what the bound of an update is multiplied by in a sum with coefficients: the largest |c_i|."""
    return float(np.abs(coefficients).max())


def sketch_length(dimension: int) -> int:
    """Give numbers of the sketch of an update: at most an eighth of its own.

    >>> sketch_length(10_000), sketch_length(1_000)
    (1024, 64)
    """
    return min(LONGEST_SKETCH, dimension // 8 // BUCKETS * BUCKETS)


def _places(messages: Mapping[str, Tree]) -> dict[str, str]:
    """Give names for the simulated sites, sorted as the clients are."""
    return {f"client{k:04}": client for k, client in enumerate(messages)}


def sum_code(
    form: Tree, entries: Mapping[str, SummedEntry], *, sites: int, largest_weight: int
) -> FixedPoint:
    """Give the fixed point of a sum of messages.

    Args:
        form: A message, or tensors without content of its shapes.
        entries: How each entry is added up.
        sites: How many clients may contribute.
        largest_weight: Largest weight of one client.
    """
    segments = tuple(
        Segment(key, form[key].numel(), entries[key].bound, entries[key].weighted)
        for key in _present(form, entries)
    )
    return FixedPoint(bits=BITS, sites=sites, largest_weight=largest_weight, segments=segments)


def sum_vector(message: Tree, entries: Mapping[str, SummedEntry]) -> npt.NDArray[np.float64]:
    """Give the summed entries of a message as one vector, in the order of the code's segments."""
    parts = [message[key].double().flatten().numpy() for key in _present(message, entries)]
    return np.concatenate(parts) if parts else np.zeros(0)


def sum_total(
    total: npt.NDArray[np.float64],
    clients: tuple[str, ...],
    form: Tree,
    entries: Mapping[str, SummedEntry],
    weights: Mapping[str, float],
) -> Total:
    """Give an opened sum by entry."""
    present = _present(form, entries)
    parts = torch.split(torch.from_numpy(total), [form[key].numel() for key in present])
    sums = {key: torch.zeros(t.shape, dtype=torch.float64) for key, t in form.items() if key in entries}
    sums |= {key: part.view(form[key].shape) for key, part in zip(present, parts, strict=True)}
    return Total(clients=clients, weight=float(sum(weights[c] for c in clients)), sums=sums)


def _present(form: Tree, entries: Mapping[str, SummedEntry]) -> list[str]:
    return [key for key in entries if key in form and form[key].numel()]
