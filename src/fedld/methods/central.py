from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedld.data import Client, Federation
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class Central(Method):
    """All data in one place, the upper reference: SGD on the pooled samples, the same epochs a round."""

    card: ClassVar[Card] = Card("Central", "reference", communication="all data up")

    def federation(self, federation: Federation) -> Federation:
        """One client that holds everybody's samples."""
        owned = ((client.train, client.test, client.validation) for client in federation.clients)
        train, test, validation = (np.sort(np.concatenate(part)) for part in zip(*owned, strict=True))
        return replace(federation, clients=(Client("pooled", train, test, validation=validation),))
