"""What a client uses and keeps: the images of a round, and its state between rounds.

States lie on disk, one file per client and round, with a checksum. A checkpoint of round t names for every
client the round of its newest state, so a crash between the two loses nothing: newer files are not referred
to.
"""

import os
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load, save

from fedld.data.client import Positions
from fedld.data.splits import Mask, held_out
from fedld.engine.jobs import Setup
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.records.writer import read_checksummed, write_checksummed
from fedld.seeds import numpy_generator


class Draws:
    """Draws among the images of a run's clients: the same in every worker."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.seed = setup, seed

    def part(self, client: str, positions: Positions, limit: int, *purpose: str | int) -> Positions:
        """Draw at most `limit` of some of a client's images, drawn for a purpose."""
        if limit >= len(positions):
            return positions
        generator = numpy_generator(self.seed, *purpose, client)
        return np.sort(generator.choice(positions, limit, replace=False))

    def training_images(self, client: str, round_: int) -> Positions:
        """Give the images that a client trains on in a round: all but the held-out ones."""
        return self.setup.federation.client(client).train[~self._held_out(client, round_)]

    def candidates(self, client: str, round_: int, limit: int) -> Positions:
        """Give the images on which a client measures the candidate steps of a round.

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
        """Give a mask of a client's training images: every class in proportion, and whole patients."""
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


class StateStore:
    """States by client and round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, client: str, round_: int) -> Path:
        return self.folder / _name(client, round_)

    def load(self, client: str, round_: int) -> Tree:
        """Give the state as saved in a round; before the first, an empty one."""
        if not round_:
            return {}
        try:
            return dict(load(read_checksummed(self._path(client, round_))))
        except (OSError, ValueError) as error:
            # A site tells the server this sentence: no path may be in it.
            raise FedLDError(
                f"the state that this client kept in round {round_} is damaged: {_reason(error)}"
            ) from None

    def check(self, state_rounds: Mapping[str, int]) -> None:
        """Raise a ValueError unless the state of every client is whole, as of its round (0: none yet)."""
        for client, round_ in state_rounds.items():
            if round_:
                try:
                    read_checksummed(self._path(client, round_))
                except (OSError, ValueError) as error:
                    raise ValueError(f"{self._path(client, round_).name}: {_reason(error)}") from None

    def save(self, client: str, round_: int, state: Tree) -> None:
        """Write atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = save({key: value.detach().contiguous().cpu() for key, value in state.items()})
        write_checksummed(self._path(client, round_), content)

    def prune(self, keep: set[tuple[str, int]]) -> None:
        """Delete every state that no kept checkpoint refers to."""
        wanted = {_name(client, round_) for client, round_ in keep}
        for name in os.listdir(self.folder) if self.folder.exists() else ():
            if ".state" in name and name not in wanted:
                (self.folder / name).unlink(missing_ok=True)


def _name(client: str, round_: int) -> str:
    return f"{_stem(client)}.round_{round_:05d}.state"


@lru_cache(maxsize=1 << 16)
def _stem(client: str) -> str:
    """Make a file name of a client's: unusual characters go, and a digest tells apart what is left."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", client)[:40]
    return f"{plain}.{sha256(client.encode()).hexdigest()[:12]}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
