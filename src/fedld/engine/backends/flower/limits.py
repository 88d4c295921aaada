"""What a site lets a server ask of it. The site's operator sets these; no message can."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.config.experiment import Experiment
from fedld.engine.backends.flower.wire import JOBS
from fedld.engine.hardware import estimate_unbuilt, free_memory
from fedld.engine.jobs import ClientJob, TrainJob
from fedld.errors import FedLDError
from fedld.methods import Method
from fedld.methods.feddyn import FedDyn
from fedld.methods.fedpac import FedPAC
from fedld.methods.fedprox import FedProx
from fedld.methods.momentum import FedACG
from fedld.methods.sharpness import FedSpeed
from fedld.models import MODELS
from fedld.paths import cache_size
from fedld.records.writer import write_atomically
from fedld.tasks import Tally

FORGETTING = 0.1
"""Most of the earlier steps that a step may forget: an update then shows at least ten steps about alike."""


SMALL = 1e9
"""Bytes that an order may always need: what is free at one moment is not what is free at the next."""


class QuotaError(FedLDError):
    """The site's disk is not for that."""


def _pull(method: Method) -> float:
    """The factor on w - w_t in a step of a method whose clients are pulled back to where they began."""
    match method:
        case FedProx() | FedACG():
            return method.mu
        case FedDyn():
            return method.alpha
        case FedSpeed():
            return 1 / method.lam
    return 0.0


@dataclass(frozen=True)
class Limits:
    """Bounds that the site's operator sets.

    min_images          least images of any measurement that leaves, and of any class in it
    min_batch           least images of a training step
    max_image_size      most pixels along a side
    max_epochs          most epochs per round, whatever part of the model they train
    max_rounds          most rounds of a run
    max_runs            most runs begun within a day
    max_models          most models of other sites measured in a round; 0 for none
    max_measurements    most models measured in a run
    cache_gb            gigabytes of decoded images on disk
    memory_gb           gigabytes of memory that an order may need; 0 for what is free
    images_per_feature  least images for each of the features whose second moments leave
    """

    min_images: int = 50
    min_batch: int = 8
    max_image_size: int = 1024
    max_epochs: int = 100
    max_rounds: int = 1000
    max_runs: int = 100
    max_models: int = 64
    max_measurements: int = 5000
    cache_gb: float = 50.0
    memory_gb: float = 0.0
    images_per_feature: float = 0.1

    def __post_init__(self) -> None:
        if self.min_images < 2:
            raise FedLDError("--min-images is at least 2: no loss of a single image leaves a site")
        if negative := [field.name for field in fields(self) if getattr(self, field.name) < 0]:
            raise FedLDError(f"--{negative[0].replace('_', '-')} is not negative")

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

    def check_order(
        self, experiment: Experiment, method: Method, jobs: Sequence[ClientJob], train: int
    ) -> None:
        """Refuse an order that asks for too much work, or for an update of too few images."""
        self.check_data(train)
        self.check_size(experiment.image_size)
        if experiment.rounds > self.max_rounds:
            raise FedLDError(f"it takes part in runs of at most {self.max_rounds} rounds")
        if experiment.local_epochs > self.max_epochs:
            raise FedLDError(f"it trains for at most {self.max_epochs} epochs, not {experiment.local_epochs}")
        if (experiment.local_steps or 0) > self.most_steps(experiment.batch_size, train):
            per_epoch = -(-train // experiment.batch_size)
            raise FedLDError(f"it trains for at most {self.max_epochs} epochs, {per_epoch} steps each")
        self._check_update(experiment, method)
        if len(jobs) > JOBS or sum(isinstance(job, TrainJob) for job in jobs) > 1:
            raise FedLDError(f"an order has at most {JOBS} jobs and one training")

    def check_memory(
        self, experiment: Experiment, input_shape: tuple[int, ...], classes: int, train: int
    ) -> None:
        """Refuse an order that needs more memory than the site gives, before anything is made of its size."""
        if experiment.model in MODELS or len(input_shape) != 3:
            return  # a network that is installed at the site itself
        needed = estimate_unbuilt(experiment, input_shape, classes, train)
        free = self.memory_gb * 1e9 or free_memory()
        if free is not None and needed > max(free, SMALL):
            raise FedLDError(
                f"it would need about {needed / 1e9:.1f} GB of memory and has {free / 1e9:.1f} GB: "
                "lower batch_size or image_size"
            )

    def most_steps(self, batch_size: int, train: int) -> int:
        """Steps of all training in a round.

        >>> Limits(max_epochs=3).most_steps(50, 120)
        9
        """
        return self.max_epochs * -(-train // batch_size)

    def _check_update(self, experiment: Experiment, method: Method) -> None:
        """Refuse training of which an update would show few images: the last ones, where steps are forgotten.

        A step with weight decay multiplies the weights, and with them all earlier steps, by 1 - lr x decay; a
        proximal term does the same.
        """
        steps, batch = experiment.local_steps, experiment.batch_size
        if batch < self.min_batch:
            raise FedLDError(f"it trains on at least {self.min_batch} images in a step, not {batch}")
        if steps is not None and steps * batch < self.min_images:
            raise FedLDError(f"it makes no update of {steps} steps with {batch} images each")
        rates = [experiment.lr, experiment.head_lr or 0.0, *experiment.client_lr.values()]
        rate = max(*rates, method.head_lr if isinstance(method, FedPAC) else 0.0)
        forgotten = rate * (experiment.weight_decay + _pull(method))
        if forgotten > FORGETTING:
            what = "lr x (weight_decay + proximal term)" if _pull(method) else "lr x weight_decay"
            raise FedLDError(f"{what} is at most {FORGETTING:g} there, not {forgotten:g}")

    def part(self, limit: int, images: int) -> int | None:
        """Images to measure of those there are, None for all: neither few nor all but a few.

        >>> Limits(50).part(64, 500), Limits(50).part(480, 500)
        (64, None)
        """
        if limit < self.min_images:
            raise FedLDError(f"it measures at least {self.min_images} images, not {limit}")
        return None if images - limit < self.min_images else limit

    def large_classes(self, strata: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask of the images whose class (or other stratum) has at least `min_images` among them.

        >>> Limits(2).large_classes(np.array([0, 0, 1, 2, 2])).tolist()
        [True, True, False, True, True]
        """
        counts = np.bincount(strata)
        return np.asarray(counts[strata] >= self.min_images)

    def leaves(self, tally: Tally) -> Tally:
        """A measurement on its way out."""
        if 0 < tally.count < self.min_images:
            raise FedLDError(f"it gives no measurement of {tally.count} images, at least {self.min_images}")
        return tally
