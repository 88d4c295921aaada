"""The secure sum as a transform: the server of a run on one machine sees nothing but the sum of updates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedld.layout import Layout, Tree
from fedld.privacy.context import LEAST_SITES, MOST_SITES
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.simulation import secure_sum
from fedld.transforms.base import BUFFERS, PARAMETERS, Sender, Total, UpdateTransform

LARGEST_CHANGE = 2.0**10  # of a parameter in a round; beyond it a client is refused, never clipped
LARGEST_BUFFER = 2.0**30  # counters of batches are among them


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

    def total(self, messages: Mapping[str, Tree], weights: Mapping[str, float], layout: Layout) -> Total:
        """Sum the messages by the protocol itself.

        Raises:
            FedLDError: there are fewer than three clients, or a number is beyond its bound.
        """
        lengths = {PARAMETERS: layout.shared, BUFFERS: layout.shared_end - layout.trainable}
        bounds = {PARAMETERS: LARGEST_CHANGE, BUFFERS: LARGEST_BUFFER}
        code = FixedPoint(
            bits=64,
            sites=len(messages),
            largest_weight=max(int(weight) for weight in weights.values()),
            segments=tuple(Segment(key, lengths[key], bounds[key]) for key in lengths if lengths[key]),
        )
        places = {f"client{k:04}": client for k, client in enumerate(messages)}
        vectors = {
            place: np.concatenate([messages[client][part.name].double().numpy() for part in code.segments])
            for place, client in places.items()
        }
        counts = {place: int(weights[client]) for place, client in places.items()}
        opened = secure_sum(vectors, counts, code)
        summed = torch.from_numpy(opened.total)
        clients = tuple(places[place] for place in opened.survivors)
        return Total(
            clients=clients,
            weight=float(sum(weights[client] for client in clients)),
            parameters=summed[: layout.shared],
            buffers=summed[layout.shared :],
        )
