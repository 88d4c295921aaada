"""What the user asks for: a dataset, how it is divided, and the dials of the simulated one."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data.partition import partition
from fedld.errors import FedLDError


@dataclass(frozen=True)
class DataSpec:
    """One federation, written down.

    dataset: fundus-sim, digits, npz:PATH, folder:PATH, retina or covid-fl (these two with `data_root`).
    partition: auto (the clients the dataset names, else dirichlet), iid, dirichlet, dirichlet-sslfl,
        quantity, classes, site, or column:NAME.
    split: a published client list (Retina 1, 2 or 3; `npz:` with sslfl_split columns).
    image_size: None keeps the dataset's own (fundus-sim 32, folder 96, retina and covid-fl 384).
    samples, feature_shift, shortcut: fundus-sim only (see `fedld.data.fundus`).
    """

    dataset: str = "fundus-sim"
    clients: int = 5
    partition: str = "auto"
    alpha: float = 0.5
    classes_per_client: int = 2
    min_size: int = 10
    seed: int = 0
    test_fraction: float = 0.2
    image_size: int | None = None
    data_root: Path | None = None
    split: int | None = None
    skip_bad: bool = False
    samples: int = 2500
    feature_shift: float = 0.5
    shortcut: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.test_fraction < 1:
            raise FedLDError(f"test_fraction must lie between 0 and 1, not {self.test_fraction:g}.")
        if self.image_size is not None and not 8 <= self.image_size <= 4096:
            raise FedLDError(f"image_size must lie between 8 and 4096 pixels, not {self.image_size}.")
        if not 0 <= self.shortcut <= 1:
            raise FedLDError(f"shortcut must lie between 0 and 1, not {self.shortcut:g}.")
        if not (math.isfinite(self.feature_shift) and 0 <= self.feature_shift <= 2):
            raise FedLDError(f"feature_shift must lie between 0 and 2, not {self.feature_shift:g}.")
        if not 1 <= self.samples <= 10_000_000:
            raise FedLDError(f"samples must lie between 1 and 10000000, not {self.samples}.")
        if self.split is not None and self.partition not in ("auto", f"column:sslfl_split{self.split}"):
            raise FedLDError(
                f"split {self.split} is a published client list and excludes partition '{self.partition}'."
            )

    def divide(self, labels: NDArray[np.int64], name: str) -> list[NDArray[np.int64]]:
        """Draw the partition called `name` with this spec's dials."""
        return partition(
            name,
            labels,
            self.clients,
            alpha=self.alpha,
            classes_per_client=self.classes_per_client,
            min_size=self.min_size,
            seed=self.seed,
        )
