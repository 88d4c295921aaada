"""Datasets, partitions and the Federation: the clients' images and one global test set."""

from fedld.data.federation import Client, Federation
from fedld.data.load import DATASETS, load
from fedld.data.partition import PARTITIONS
from fedld.data.spec import DataSpec


def describe(federation: Federation) -> dict[str, object]:
    """Plain-data summary of a federation."""
    return federation.describe()


__all__ = ["DATASETS", "PARTITIONS", "Client", "DataSpec", "Federation", "describe", "load"]
