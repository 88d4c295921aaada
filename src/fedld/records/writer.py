"""The run directory: what happened, line by line, and nothing half-written.

config.toml        the experiment, every default written out
run.json           format of the records, the task and its measures
environment.json   the machine and the libraries that began it
rounds.jsonl       one line per round; lines of this and the next three files end with a checksum (`chain`)
clients.jsonl      one line per round and client
conflict.jsonl     the rule's report, with the Gram matrix of at most 100 updates, one line per round
cross_loss.jsonl   M[j, i] = L_j(w_i) and L_j(w) of the decomposed rounds
federation.json    who held what when the run began, and a fingerprint of it
failures.log       what clients and evaluations failed of, with tracebacks, if any did
failed.txt         why the run could not go on, until it does
summary.json       the result, with a checksum of its own and those of the records
model.safetensors  the final global model
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypedDict, cast

from fedld.errors import FedLDError
from fedld.paths import make_folder
from fedld.records.chain import last_digest, sealed, split
from fedld.records.schema import CASES, FAILED, FILES, Environment, L, RecordFile, RunFacts, Summary

CHECKSUMMED = ("run.json", "federation.json", "predictions.csv", "predictions.json", CASES)
"""Files beside the records of which summary.json has a checksum."""


class Extent(TypedDict):
    """How far a record file reached, and the digest of all bytes up to there."""

    bytes: int
    sha256: str


def dump(value: Any) -> str:
    """Write JSON that every reader accepts: numbers that are not finite become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # rare, so that most values are not copied
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
    """Write aside, sync, rename: a reader sees the old file or the new one.

    What is no regular file (a pipe, a device) is written to directly: renaming would replace it by a file.
    """
    if _special(path):
        with path.open("wb") as stream:
            stream.write(content)
        return
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _special(path: Path) -> bool:
    """Tell whether a path is something other than a plain file on a disk."""
    link = path.is_symlink() and any(path.absolute().is_relative_to(folder) for folder in ("/dev", "/proc"))
    return path.exists() and (link or not path.is_file())  # /dev/stdout is a link, to a file if redirected


def each_line(folder: Path, file: RecordFile[L]) -> Iterator[L]:
    """Read the lines of a record file that is not being written; a missing file has none."""
    from fedld.records.format1 import upgrade  # needs numpy, which a command that only writes starts without

    path = folder / file.name
    if path.exists():
        with path.open("rb") as lines:
            parsed = (json.loads(split(line)[0]) for line in lines if line.strip())
            yield from (cast(L, upgrade(file.name, line)) for line in parsed)


def read_lines(folder: Path, file: RecordFile[L]) -> list[L]:
    """Read all lines of a record file that is not being written."""
    return list(each_line(folder, file))


class Locked(FedLDError):  # noqa: N818 (reads as what is wrong)
    """Another process is writing to a run's folder."""


class RunDirectory:
    """One run's files, locked against a second writer for as long as it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path)
        try:
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise FedLDError(f"cannot write to '{path}': {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Locked(f"another process is writing to '{path}'") from None
        self._open: dict[str, IO[bytes]] = {}
        self._digests = {file.name: sha256() for file in FILES}
        self._last: dict[str, str] = {}  # digest of the last line of every open file

    def begin(
        self, config: str, environment: Environment, federation: dict[str, Any], facts: RunFacts
    ) -> None:
        """Start a new run; a directory that already holds one is refused."""
        if (self.path / "config.toml").exists():
            raise FedLDError(
                f"'{self.path}' already holds a run: choose another --out, or continue it with --resume"
            )
        write_atomically(self.path / "run.json", dump(facts).encode() + b"\n")
        write_atomically(self.path / "environment.json", dump(environment).encode() + b"\n")
        write_atomically(self.path / "federation.json", dump(federation).encode() + b"\n")
        write_atomically(self.path / "config.toml", config.encode())

    def append(self, file: RecordFile[L], line: L) -> None:
        """Add a line in one write."""
        if file.name not in self._open:
            self._last[file.name] = last_digest(self.path / file.name)
            self._open[file.name] = (self.path / file.name).open("ab", buffering=0)
        text, self._last[file.name] = sealed(dump(line).encode(), self._last[file.name])
        content = text + b"\n"
        self._open[file.name].write(content)
        self._digests[file.name].update(content)

    def log(self, where: str, text: str) -> None:
        """Keep what went wrong in failures.log, tracebacks and all."""
        with (self.path / "failures.log").open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {where}\n{text.rstrip()}\n\n")

    def fail(self, why: str | None) -> None:
        """Leave the sentence of a failure for whoever reads the run; None: it goes on."""
        path = self.path / FAILED
        if why is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, why.encode())

    def checksums(self) -> dict[str, str]:
        """Compute SHA-256 of every record file that was written, and of the files in `CHECKSUMMED`."""
        digests = {name: d.hexdigest() for name, d in self._digests.items() if (self.path / name).exists()}
        for name in CHECKSUMMED:
            if (self.path / name).exists():
                digests[name] = sha256((self.path / name).read_bytes()).hexdigest()
        return digests

    def write_summary(self, summary: Summary) -> None:
        """Mark the run as finished."""
        text, _ = sealed(dump(summary).encode(), "")
        write_atomically(self.path / "summary.json", text + b"\n")

    def extents(self) -> dict[str, Extent]:
        """Sync every record file, and give length and digest for a checkpoint."""
        for file in self._open.values():
            os.fsync(file.fileno())
        paths = {name: self.path / name for name in self._digests}
        sizes = {name: path.stat().st_size if path.exists() else 0 for name, path in paths.items()}
        return {name: {"bytes": sizes[name], "sha256": d.hexdigest()} for name, d in self._digests.items()}

    def check(self, extents: dict[str, Extent]) -> None:
        """Check that every record file begins with the bytes of a checkpoint; ValueError if not."""
        for name, extent in extents.items():
            if self._prefix(name, extent["bytes"]).hexdigest() != extent["sha256"]:
                raise ValueError(f"{name} was shortened or changed since")

    def truncate(self, extents: dict[str, Extent]) -> None:
        """Take back what was written after a checkpoint; without one, everything."""
        for name in self._digests:
            path, end = self.path / name, extents[name]["bytes"] if name in extents else 0
            self._digests[name] = self._prefix(name, end)
            if path.exists():
                os.truncate(path, end)

    def _prefix(self, name: str, size: int) -> Any:
        """Compute the digest of the first bytes of a record file, or of all where it is shorter."""
        digest, path = sha256(), self.path / name
        if path.exists():
            with path.open("rb") as file:
                while size and (block := file.read(min(size, 1 << 20))):
                    digest.update(block)
                    size -= len(block)
        return digest

    def close(self) -> None:
        """Close files and give up the lock."""
        for file in self._open.values():
            file.close()
        self._lock.close()


def write_checksummed(path: Path, content: bytes) -> None:
    """Write a checksum and the content: to a file beside it, synced, then renamed."""
    write_atomically(path, sha256(content).hexdigest().encode() + b"\n" + content)


def read_checksummed(path: Path) -> bytes:
    """Read the content; ValueError if it does not match its checksum."""
    digest, _, content = path.read_bytes().partition(b"\n")
    if sha256(content).hexdigest().encode() != digest:
        raise ValueError("wrong checksum")
    return content
