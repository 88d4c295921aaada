"""Clients' states on disk: one safetensors file a client and round, written aside and renamed.

A checkpoint of round t names for every client the round of its newest state, so a crash between the two
loses nothing: newer files are simply not referred to.
"""

import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from fedld.layout import Tree


class StateStore:
    """States by client and round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, client: int, round_: int) -> Path:
        return self.folder / f"client_{client:05d}.round_{round_:05d}.safetensors"

    def load(self, client: int, round_: int) -> Tree:
        """State as saved in a round; before the first, an empty one."""
        return dict(load_file(self._path(client, round_))) if round_ else {}

    def save(self, client: int, round_: int, state: Tree) -> None:
        """Write atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(client, round_)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        save_file({key: value.detach().contiguous().cpu() for key, value in state.items()}, aside)
        os.replace(aside, path)

    def prune(self, keep: set[tuple[int, int]]) -> None:
        """Delete every state that no kept checkpoint refers to."""
        wanted = {self._path(client, round_) for client, round_ in keep}
        for path in self.folder.glob("client_*"):
            if path not in wanted:
                path.unlink(missing_ok=True)
