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
        train = np.sort(np.concatenate([client.train for client in federation.clients]))
        test = np.sort(np.concatenate([client.test for client in federation.clients]))
        return replace(federation, clients=(Client("pooled", train, test),))
