"""Datasets, partitions and the Federation: the clients' images and one global test set."""

import sys
from types import ModuleType
from typing import Any

from fedld.data.augment import AUGMENTATIONS, Augmentation, OwnAugmentation, as_augmentation
from fedld.data.client import Client
from fedld.data.datasets import DATASETS, check_names, load
from fedld.data.federation import Federation
from fedld.data.partition import PARTITIONS
from fedld.data.spec import DataSpec
from fedld.registry import configure


def describe(federation: Federation) -> dict[str, Any]:
    """Summarise a federation as plain data."""
    return federation.describe()


def make(dataset: str = "fundus-sim", **options: Any) -> Federation:
    """Load a dataset and divide it among clients; at the top level this is `fedld.data(...)`.

    Args:
        dataset: name of a dataset: "digits", "fundus-sim", "folder:DIR", "npz:FILE", "csv:FILE", ...
        options: fields of `DataSpec`: clients, partition (a name, or a function from labels to one array of
            positions per client), alpha, seed, image_size, samples, ...

    Returns:
        The federation.

    Raises:
        FedLDError: a name or option is wrong, or the data cannot be read.

    >>> import fedld
    >>> [client.size for client in fedld.data("digits", clients=3, partition="iid").clients]
    [480, 479, 479]
    """
    return load(configure(DataSpec(), {"dataset": dataset, **options}, "data"))


class _Callable(ModuleType):
    """This room, which at the top level is also the verb that opens a dataset."""

    def __call__(self, dataset: str = "fundus-sim", **options: Any) -> Federation:
        """See `make`."""
        return make(dataset, **options)


sys.modules[__name__].__class__ = _Callable

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "PARTITIONS",
    "Augmentation",
    "Client",
    "DataSpec",
    "Federation",
    "OwnAugmentation",
    "as_augmentation",
    "check_names",
    "describe",
    "load",
    "make",
]
