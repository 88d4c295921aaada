"""What a site discloses of its measurements: which images are measured, and how exactly the result is told.

A server chooses the models that are measured. A crafted model can give all images of the other classes the
same loss, so that a sum over many images tells of one class alone, and of one image where the class has one.
Therefore every class that is measured has at least `min_images` images in the measured set, the loss of one
image is bounded, and means are rounded.
"""

import math
import secrets
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedld.aggregation import Vote
from fedld.aggregation.measured import LARGEST_LOSS
from fedld.analysis.intervals import Estimate
from fedld.analysis.sites import SiteResult
from fedld.data.client import Positions
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.client_data import Draws
from fedld.engine.jobs import PrepareJob, Setup, SharedMemory, SiteTest, SiteTestJob, TrainJob
from fedld.engine.worker import Worker
from fedld.local import LocalClient
from fedld.local.noise import KEY_BYTES
from fedld.seeds import numpy_generator
from fedld.tasks import Tally

DIGITS = 3
"""Decimals of a mean loss that leave a site.

The sampling error of a mean loss is about 1 / sqrt(n): 0.01 for ten thousand images. A third decimal is below
it, so a fourth would tell nothing of the model. Of one image among n it says at most log2(20000 / n) bits.
"""


class SiteDraws(Draws):
    """Draws of a site: by its own number, and so that every class measured has enough images.

    A server that chose the parts could tell single images' losses from sums over many of them.
    """

    def __init__(self, setup: Setup, seed: int, limits: Limits) -> None:
        super().__init__(setup, seed)
        self.limits = limits

    def part(self, client: str, positions: Positions, limit: int, *purpose: str | int) -> Positions:
        """As many as the site's limits allow; parts are not nested."""
        part = self.limits.part(limit, len(positions))
        if part is None:
            return self._measurable(client, positions, positions, *purpose)
        drawn = super().part(client, positions, part, *purpose, part)
        return self._measurable(client, drawn, positions, *purpose, part)

    def candidates(self, client: str, round_: int, limit: int) -> Positions:
        """The images for candidate steps, with enough of every class."""
        own = self.setup.federation.client(client)
        pool = own.validation if len(own.validation) else own.train
        drawn = super().candidates(client, round_, limit)
        return self._measurable(client, drawn, pool, "candidates", round_)

    def enough(self, out: int, left: int) -> bool:
        """A site with few images trains on all of them."""
        return min(2 * out, left) >= self.limits.min_images and super().enough(out, left)

    def _measurable(self, client: str, drawn: Positions, pool: Positions, *purpose: str | int) -> Positions:
        """The drawn images, by class: none of a small class, of others neither few nor all but a few.

        Images that are missing of a class are drawn from the `pool` of which `drawn` is a part.
        """
        federation, least = self.setup.federation, self.limits.min_images
        labels = np.zeros(len(federation.labels), np.int64)
        labels[pool] = self.setup.task.strata(np.array(federation.labels[pool]))
        parts: list[Positions] = []
        for label in np.unique(labels[drawn]):
            chosen, everything = drawn[labels[drawn] == label], pool[labels[pool] == label]
            if len(everything) < least:
                continue
            count = max(len(chosen), least)
            if len(everything) - count < least:
                parts.append(everything)
                continue
            rest = np.setdiff1d(everything, chosen)
            generator = numpy_generator(self.seed, "enough", *purpose, client, int(label), count)
            parts += [chosen, generator.choice(rest, count - len(chosen), replace=False)]
        return np.sort(np.concatenate(parts)) if parts else drawn[:0]


class SiteWorker(Worker):
    """The engine's worker, whose sums leave out the images of small classes."""

    def __init__(self, setup: Setup, memory: SharedMemory, draws: SiteDraws) -> None:
        super().__init__(setup, memory, draws)
        self.limits = draws.limits

    def _client(self, job: PrepareJob | TrainJob) -> LocalClient:
        """The engine's client, within the site's bounds."""
        client = super()._client(job)
        client.most_steps = self.limits.most_steps(client.training.batch_size, len(client.samples))
        client.smallest_class = self.limits.min_images
        # Fresh for every training: if an order is repeated, noise that is drawn again must be another.
        client.private_key = secrets.token_bytes(KEY_BYTES)
        return client

    def tally(self, logits: Tensor, labels: Tensor) -> Tally:
        """Bounded losses and further sums of the images whose class has enough of them here."""
        task = self.setup.task
        kept = torch.from_numpy(self.limits.large_classes(task.strata(labels.numpy())))
        logits, labels = logits[kept], labels[kept]
        losses = task.losses(logits, labels).nan_to_num(nan=LARGEST_LOSS).clamp(0.0, LARGEST_LOSS)
        sums = task.sums(logits, labels)
        return Tally(len(labels), losses.sum().item(), losses.square().sum().item(), sums)

    def tested(self, rows: Positions) -> Positions:
        """The test images whose class has enough of them."""
        strata = self.setup.task.strata(np.array(self.setup.federation.labels[rows]))
        return rows[self.limits.large_classes(strata)]

    def site_test(self, job: SiteTestJob) -> SiteTest:
        """The final models on the site's test images; few images of a class are told nothing of."""
        if self.setup.task.name != "classification":
            return SiteTest({})  # intervals are for shares of right answers
        federation = self.setup.federation
        test = federation.client(job.incoming.client).test
        labels = np.array(federation.labels[test])
        if not len(self.tested(test)):
            return SiteTest({})
        found = self.run(job)
        assert isinstance(found, SiteTest)
        whole = bool(self.limits.large_classes(labels).all())
        positive = int((labels == len(federation.classes) - 1).sum())
        balanced = min(positive, len(labels) - positive) >= self.limits.min_images
        return SiteTest(
            {which: _result(one, auroc=whole, sensitivity=balanced) for which, one in found.models.items()}
        )


def _result(one: SiteResult, *, auroc: bool, sensitivity: bool) -> SiteResult:
    """A result of a test, rounded, without what would tell of few images."""
    return replace(
        one,
        accuracy=_rounded(one.accuracy),
        auroc=_rounded(one.auroc) if auroc else Estimate(None),
        sensitivity=_rounded(one.sensitivity) if sensitivity else Estimate(None),
    )


def _rounded(one: Estimate) -> Estimate:
    values = (None if x is None else round(x, DIGITS) for x in (one.value, one.low, one.high))
    return Estimate(*values)


def rounded_tally(tally: Tally) -> Tally:
    """A tally whose mean loss has `DIGITS` decimals; further means that are no counts as many digits and one.

    >>> rounded_tally(Tally(50, 12.34567, 8.0, {"correct": 40}))
    Tally(count=50, loss=12.35, loss_squared=8.0, sums={'correct': 40})
    """
    n = max(tally.count, 1)
    loss, squared = round(tally.loss / n, DIGITS) * n, round(tally.loss_squared / n, DIGITS) * n
    sums = {
        key: value if value == round(value) else float(f"{value / n:.{DIGITS}e}") * n
        for key, value in tally.sums.items()
    }
    return replace(tally, loss=loss, loss_squared=squared, sums=sums)


def rounded_vote(vote: Vote) -> Vote:
    """A vote with rounded losses; spreads are rounded up, so that no difference looks surer than it is."""
    scale = 10.0**DIGITS
    losses = tuple(round(loss, DIGITS) for loss in vote.losses)
    squares = tuple(math.ceil(x * scale) / scale if math.isfinite(x) else x for x in vote.squares)
    return replace(vote, losses=losses, squares=squares)


def rounded_metrics(metrics: dict[str, float], *, small_classes: bool) -> dict[str, float]:
    """What a client measures of its training; the rate is a setting, not a measurement.

    The loss in training is a mean over all images. Where some are of a small class it stays there (NaN).

    >>> rounded_metrics({"steps": 3.0, "train_loss": 0.12345}, small_classes=False)
    {'steps': 3.0, 'train_loss': 0.123}
    >>> rounded_metrics({"steps": 3.0, "train_loss": 1e6}, small_classes=False)
    {'steps': 3.0, 'train_loss': 20.0}
    """
    told = {key: value if key == "lr" else round(value, DIGITS) for key, value in metrics.items()}
    loss = told.get("train_loss", math.nan)
    if not math.isnan(loss):
        told["train_loss"] = math.nan if small_classes else max(-LARGEST_LOSS, min(loss, LARGEST_LOSS))
    return told
