"""Which of its images a client trains on in a round, and which it measures."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedld.data.client import Positions
from fedld.data.splits import Mask, held_out
from fedld.engine.jobs import Setup
from fedld.seeds import numpy_generator


class Draws:
    """Draws among the images of a run's clients: the same in every worker."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed = setup, seed

    def part(self, client: str, positions: Positions, limit: int, *purpose: str | int) -> Positions:
        """At most `limit` of some of a client's images, drawn for a purpose."""
        if limit >= len(positions):
            return positions
        generator = numpy_generator(self.seed, *purpose, client)
        return np.sort(generator.choice(positions, limit, replace=False))

    def training_images(self, client: str, round_: int) -> Positions:
        """Give the images that a client trains on in a round: all but the held-out ones."""
        return self.setup.federation.client(client).train[~self._held_out(client, round_)]

    def candidates(self, client: str, round_: int, limit: int) -> Positions:
        """The images on which a client measures the candidate steps of a round.

        Those that it has set aside for good, where a run sets some aside. Else those held out in this round
        and as many that do not; at a client with too few for that, some of its training images.
        """
        kept = self.setup.federation.client(client).validation
        if len(kept):
            return self.part(client, kept, limit, "candidates", round_)
        train, out = self.setup.federation.client(client).train, self._held_out(client, round_)
        if not out.any():
            return self.part(client, train, limit, "candidates", round_)
        generator = numpy_generator(self.seed, "candidates", round_, client, int(out.sum()))
        seen = generator.choice(train[~out], int(out.sum()), replace=False)
        return np.sort(np.concatenate([train[out], seen]))

    def _held_out(self, client: str, round_: int) -> Mask:
        """Mask of a client's training images: every class in proportion, and whole patients."""
        train = self.setup.federation.client(client).train
        none = np.zeros(len(train), bool)
        share = self.setup.method.rule.held_out(max(len(train), 1))
        if not share or not len(train) or len(self.setup.federation.client(client).validation):
            return none
        # Another share is another draw: of two parts at a site the larger must not contain the smaller.
        generator = numpy_generator(self.seed, "sits out", round_, client, repr(share))
        patients = None if self._patients is None else self._patients[train]
        out = held_out(self.setup.federation.strata[train], share, generator, patients)
        return out if self.enough(int(out.sum()), int((~out).sum())) else none

    def enough(self, out: int, left: int) -> bool:
        """Say whether images may be held out where so many are left; BatchNorm needs at least two."""
        return left >= max(out, 2)

    @cached_property
    def _patients(self) -> NDArray[np.str_] | None:
        return self.setup.federation.patients
