"""The run directory: what happened, line by line, and nothing half-written.

config.toml        the experiment, every default written out
rounds.jsonl       one line a round
clients.jsonl      one line a round and client
conflict.jsonl     the Gram matrix of the updates and the rule's report, one line a round
cross_loss.jsonl   M[j, i] = L_j(w_i) and L_j(w) of the decomposed rounds
summary.json       the result
model.safetensors  the final global model
"""

import fcntl
import json
import math
import os
from pathlib import Path
from typing import IO, Any

from fedld.errors import FedLDError

Line = dict[str, Any]
FILES = ("rounds.jsonl", "clients.jsonl", "conflict.jsonl", "cross_loss.jsonl")


def dump(value: Any) -> str:
    """JSON that every reader accepts: numbers that are not finite become null."""
    return json.dumps(_clean(value), separators=(",", ":"))


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def write_atomically(path: Path, content: bytes) -> None:
    """Write aside, sync, rename: a reader sees the old file or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_lines(path: Path) -> list[Line]:
    """All whole lines of a jsonl file; a missing file has none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


class RunDirectory:
    """One run's files, locked against a second writer for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise FedLDError(f"cannot write to '{path}': {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FedLDError(f"another process is writing to '{path}'") from None
        self._open: dict[str, IO[bytes]] = {}

    def begin(self, config: str) -> None:
        """Start a new run; a directory that already holds one is refused."""
        if (self.path / "config.toml").exists():
            raise FedLDError(
                f"'{self.path}' already holds a run: choose another --out, or continue it with --resume"
            )
        write_atomically(self.path / "config.toml", config.encode())

    def append(self, name: str, line: Line) -> None:
        """Add a line in one write."""
        if name not in self._open:
            self._open[name] = (self.path / name).open("ab", buffering=0)
        self._open[name].write(dump(line).encode() + b"\n")

    def offsets(self) -> dict[str, int]:
        """Length of every record file, synced: what a checkpoint vouches for."""
        for file in self._open.values():
            os.fsync(file.fileno())
        paths = {name: self.path / name for name in FILES}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}

    def truncate(self, offsets: dict[str, int]) -> None:
        """Take back what was written after a checkpoint."""
        for name in FILES:
            path = self.path / name
            if path.exists():
                os.truncate(path, offsets.get(name, 0))

    def close(self) -> None:
        """Close files and give up the lock."""
        for file in self._open.values():
            file.close()
        self._lock.close()
