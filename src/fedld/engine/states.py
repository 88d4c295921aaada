"""Clients' states on disk: one file per client and round, with a checksum.

A checkpoint of round t names for every client the round of its newest state, so a crash between the two
loses nothing: newer files are simply not referred to.
"""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from safetensors.torch import load, save

from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.records.writer import read_checksummed, write_checksummed


class StateStore:
    """States by client and round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, client: str, round_: int) -> Path:
        return self.folder / _name(client, round_)

    def load(self, client: str, round_: int) -> Tree:
        """State as saved in a round; before the first, an empty one."""
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
        """ValueError unless the state of every client is whole, as of its round (0: none yet)."""
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
    """Clients may have any name: unusual characters go, and a digest tells apart what is left."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", client)[:40]
    return f"{plain}.{sha256(client.encode()).hexdigest()[:12]}"


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
