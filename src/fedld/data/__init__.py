"""Datasets, partitions and the Federation: the clients' images and one global test set."""

from typing import Any

from fedld.data.augment import AUGMENTATIONS, Augmentation
from fedld.data.datasets import DATASETS, load
from fedld.data.federation import Client, Federation
from fedld.data.partition import PARTITIONS
from fedld.data.spec import DataSpec


def describe(federation: Federation) -> dict[str, Any]:
    """Plain-data summary of a federation."""
    return federation.describe()


__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "Augmentation",
    "Client",
    "DataSpec",
    "Federation",
    "describe",
    "load",
]
