"""The specification of a federation: a dataset, how it is divided, parameters of the simulated one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data.partition import Indices, own_partition, partition, repair
from fedld.data.targets import check_task
from fedld.errors import FedLDError


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Settings from which a federation is made.

    dataset: fundus-sim, digits, npz:PATH, folder:PATH, csv:FILE, retina or covid-fl (these two with
        `data_root`).
    partition: auto (the clients the dataset names, else dirichlet), iid, dirichlet, dirichlet-sslfl,
        quantity, classes, site, or column:NAME; or a function from labels to one array of places per client.
    split: a published client list (Retina 1, 2 or 3; `npz:` with sslfl_split columns).
    image_size: None keeps the dataset's own (fundus-sim 32, folder 96, retina and covid-fl 384).
    seed, test_seed: of the partition; of the test set, where the dataset has no split of its own.
    bits: that the grey values of 16-bit files really use, where they do not say.
    patient: `folder:` only, a pattern with a group that is the patient in a file's name: `^([^_]+)_`.
    task: classification, multilabel, regression or survival; the dataset must have targets for it.
    target_column, site_column, split_column, drop: `csv:` only (see `fedld.data.sheet`).
    samples, feature_shift, shortcut: fundus-sim only (see `fedld.data.fundus`).
    """

    dataset: str = "fundus-sim"
    clients: int = 5
    partition: str | Callable[..., Sequence[Indices]] = "auto"
    alpha: float = 0.5
    classes_per_client: int = 2
    min_size: int = 10
    seed: int = 0
    test_fraction: float = 0.2
    test_seed: int = 0
    image_size: int | None = None
    data_root: Path | None = None
    split: int | None = None
    skip_bad: bool = False
    bits: int | None = None
    patient: str | None = None
    task: str = "classification"
    target_column: str | None = None
    site_column: str | None = None
    split_column: str | None = None
    drop: str = ""
    samples: int = 2500
    feature_shift: float = 0.5
    shortcut: float = 0.5

    def __post_init__(self) -> None:
        check_task(self.task)
        if not 0 < self.test_fraction < 1:
            raise FedLDError(f"test_fraction must lie between 0 and 1, not {self.test_fraction:g}")
        if self.image_size is not None and not 8 <= self.image_size <= 4096:
            raise FedLDError(f"image_size must lie between 8 and 4096 pixels, not {self.image_size}")
        if self.bits is not None and not 8 <= self.bits <= 16:
            raise FedLDError(f"bits must lie between 8 and 16, not {self.bits}")
        if not 0 <= self.shortcut <= 1:
            raise FedLDError(f"shortcut must lie between 0 and 1, not {self.shortcut:g}")
        if not (math.isfinite(self.feature_shift) and 0 <= self.feature_shift <= 2):
            raise FedLDError(f"feature_shift must lie between 0 and 2, not {self.feature_shift:g}")
        if not 1 <= self.samples <= 10_000_000:
            raise FedLDError(f"samples must lie between 1 and 10000000, not {self.samples}")
        if self.split is not None and self.partition not in ("auto", f"column:sslfl_split{self.split}"):
            raise FedLDError(
                f"split {self.split} is a published client list and excludes partition '{self.partition}'"
            )

    def notes(self, labels: NDArray[np.int64], name: str) -> tuple[str, ...]:
        """Note how the partition called `name` differs from the one that was requested."""
        if callable(self.partition) or name != "dirichlet":
            return ()
        repaired = repair(labels, self.clients, self.alpha, min_size=self.min_size, seed=self.seed)
        return () if repaired is None else (repaired,)

    def divide(self, labels: NDArray[np.int64], name: str) -> list[NDArray[np.int64]]:
        """Draw the partition called `name`, or the user's own, with this spec's options."""
        options: dict[str, Any] = {
            "alpha": self.alpha,
            "classes_per_client": self.classes_per_client,
            "min_size": self.min_size,
            "seed": self.seed,
        }
        if callable(self.partition):
            return own_partition(self.partition, labels, clients=self.clients, **options)
        return partition(name, labels, self.clients, **options)
