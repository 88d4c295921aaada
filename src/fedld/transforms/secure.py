"""The secure sum as a transform: the server of a run on one machine sees nothing but the sum of updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedld.layout import Tree
from fedld.privacy.context import LEAST_SITES, MOST_SITES
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.simulation import secure_sum
from fedld.transforms.base import Sender, SummedEntry, Total, UpdateTransform


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
        places = {f"client{k:04}": client for k, client in enumerate(messages)}
        vectors = {
            place: np.concatenate([messages[client][key].double().flatten().numpy() for key in present])
            for place, client in places.items()
        }
        counts = {place: int(weights[client]) for place, client in places.items()}
        opened = secure_sum(vectors, counts, code)
        clients = tuple(places[place] for place in opened.survivors)
        parts = torch.split(torch.from_numpy(opened.total), [form[key].numel() for key in present])
        sums = {key: tensor.double() for key, tensor in form.items() if key in entries}  # the empty ones
        sums |= {key: part.view(form[key].shape) for key, part in zip(present, parts, strict=True)}
        return Total(clients=clients, weight=float(sum(weights[c] for c in clients)), sums=sums)
