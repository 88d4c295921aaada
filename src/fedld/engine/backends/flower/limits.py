"""What a site lets a server ask of it. The site's operator sets these; no message can."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fedld.config.experiment import Experiment
from fedld.engine.backends.flower.wire import JOBS
from fedld.engine.jobs import ClientJob, TrainJob
from fedld.errors import FedLDError
from fedld.paths import cache_size
from fedld.records.writer import write_atomically
from fedld.tasks import Tally


class QuotaError(FedLDError):
    """The site's disk is not for that."""


@dataclass(frozen=True)
class Limits:
    """Least images of any measurement that leaves; most pixels along a side, epochs, gigabytes of cache.

    `images_per_feature`: least images for each of the features whose second moments leave.
    """

    min_images: int = 50
    max_image_size: int = 1024
    max_epochs: int = 100
    cache_gb: float = 50.0
    images_per_feature: float = 0.1

    def __post_init__(self) -> None:
        if self.min_images < 2:
            raise FedLDError("--min-images is at least 2: no loss of a single image leaves a site")

    def told(self) -> dict[str, Any]:
        """As a node configuration."""
        return {key.replace("_", "-"): value for key, value in asdict(self).items()}

    @classmethod
    def from_node(cls, config: Mapping[str, Any]) -> "Limits":
        """From a site's own node configuration."""
        names = {field.name: field.name.replace("_", "-") for field in fields(cls)}
        return cls(**{name: config[key] for name, key in names.items() if key in config})

    def check_size(self, image_size: int | None) -> None:
        """Refuse images larger than the site makes them."""
        if image_size is not None and image_size > self.max_image_size:
            raise FedLDError(
                f"it makes images of at most {self.max_image_size} pixels along a side, not {image_size}"
            )

    def reserve(self, folder: Path, image_size: int, images: int) -> None:
        """Refuse another size of all images if the cache would become too large; `folder` remembers sizes."""
        file = folder / "sizes"
        known = set(file.read_text().split()) if file.exists() else set()
        if str(image_size) in known:
            return
        if cache_size() + 3 * images * image_size**2 > self.cache_gb * 1e9:
            raise QuotaError(f"images of {image_size} pixels would not fit its cache of {self.cache_gb:g} GB")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(file, "\n".join(sorted({*known, str(image_size)})).encode())

    def check_data(self, train: int) -> None:
        """Refuse to describe, train on and measure too few images."""
        if train < self.min_images:
            raise FedLDError(f"it has {train} training images and takes part with at least {self.min_images}")

    def check_moments(self, images: int, features: int) -> None:
        """Refuse second moments that describe few images in detail."""
        if images < self.images_per_feature * features:
            raise FedLDError(
                f"it has {images} training images and gives second moments of {features} features for "
                f"at least {self.images_per_feature * features:.0f} (--images-per-feature)"
            )

    def check_order(self, experiment: Experiment, jobs: Sequence[ClientJob], train: int) -> None:
        """Refuse an order that asks for too much work, or for an update of too few images."""
        self.check_data(train)
        self.check_size(experiment.image_size)
        if experiment.local_epochs > self.max_epochs:
            raise FedLDError(f"it trains for at most {self.max_epochs} epochs, not {experiment.local_epochs}")
        per_epoch = -(-train // experiment.batch_size)
        if (experiment.local_steps or 0) > self.max_epochs * per_epoch:
            raise FedLDError(f"it trains for at most {self.max_epochs} epochs, {per_epoch} steps each")
        steps, batch = experiment.local_steps, experiment.batch_size
        if steps is not None and steps * batch < self.min_images:
            raise FedLDError(f"it makes no update of {steps} steps with {batch} images each")
        if len(jobs) > JOBS or sum(isinstance(job, TrainJob) for job in jobs) > 1:
            raise FedLDError(f"an order has at most {JOBS} jobs and one training")

    def part(self, limit: int, images: int) -> int | None:
        """Images to measure of those there are, None for all: neither few nor all but a few.

        >>> Limits(50).part(64, 500), Limits(50).part(480, 500)
        (64, None)
        """
        if limit < self.min_images:
            raise FedLDError(f"it measures at least {self.min_images} images, not {limit}")
        return None if images - limit < self.min_images else limit

    def leaves(self, tally: Tally | None) -> Tally | None:
        """A measurement on its way out."""
        if tally is not None and 0 < tally.count < self.min_images:
            raise FedLDError(f"it gives no measurement of {tally.count} images, at least {self.min_images}")
        return tally
