"""An append-only ledger: who asked what, what left, what was refused. Each line carries the hash of the last.

    {"n":2,"time":"2026-01-31T12:00:00.000Z","kind":"order",...,"previous":"ab..","hash":"cd.."}

A line is one write, synced before anything that it tells of happens. A crash can leave a part of a line at
the end; the next append cuts it off and says so. A changed byte is found by `check`, which names the line.
Lines that are missing at the end cannot be seen in the file itself: compare its head with one that you noted,
or with the one in the model file (metadata `ledger`).
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedld.errors import FedLDError

START = "0" * 64
"""What the first line has for `previous`."""

LedgerEntry = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """A ledger as found: whole lines, the last one's hash, the first problem, bytes of a torn end."""

    entries: list[LedgerEntry]
    head: str
    problem: str | None
    torn: int


class Ledger:
    """A ledger in a file, which several processes may write to."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, kind: str, **fields: Any) -> str:
        """Add a line and sync it; gives its hash."""
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            last, torn = _last(handle, self.file)
            if torn:
                os.ftruncate(handle, os.fstat(handle).st_size - torn)
                last = _write(handle, last, "torn", {"bytes": torn})
            return str(_write(handle, last, kind, fields)["hash"])
        finally:
            os.close(handle)

    def check(self) -> Check:
        """Read all lines and recompute every hash."""
        try:
            content = self.file.read_bytes()
        except OSError as error:
            raise FedLDError(f"the ledger '{self.file}' cannot be read: {error.strerror}") from None
        *lines, rest = content.split(b"\n")
        entries: list[LedgerEntry] = []
        head = START
        for number, raw in enumerate(lines, start=1):
            entry = _parse(raw)
            if entry is None or _line(entry) != raw or entry["hash"] != _hash(entry):
                return Check(entries, head, f"line {number} was changed", len(rest))
            if entry["previous"] != head or entry["n"] != number:
                return Check(entries, head, f"line {number} does not follow the line before it", len(rest))
            entries.append(entry)
            head = str(entry["hash"])
        return Check(entries, head, None, len(rest))

    def head(self) -> str:
        """Read the hash of the last line; raises an error unless all lines are intact."""
        checked = self.check()
        if checked.problem:
            raise FedLDError(f"'{self.file}': {checked.problem}")
        return checked.head


def _last(handle: int, file: Path) -> tuple[LedgerEntry, int]:
    """Read the last whole line, and the bytes of an unfinished one after it."""
    size, block = os.fstat(handle).st_size, 1 << 16
    tail = b""
    while len(tail) < size and tail.count(b"\n") < 2:
        start = max(0, size - len(tail) - block)
        tail = os.pread(handle, size - len(tail) - start, start) + tail
    *lines, rest = tail.split(b"\n")
    if not lines:
        return {"n": 0, "hash": START}, len(rest)
    entry = _parse(lines[-1])
    if entry is None or entry["hash"] != _hash(entry):
        raise FedLDError(f"the last line of the ledger '{file}' was changed: keep it, and begin another")
    return entry, len(rest)


def _write(handle: int, last: LedgerEntry, kind: str, fields: LedgerEntry) -> LedgerEntry:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    entry = {"n": last["n"] + 1, "time": time, "kind": kind, **fields, "previous": last["hash"]}
    entry["hash"] = _hash(entry)
    line = _line(entry) + b"\n"
    if os.write(handle, line) != len(line):
        raise FedLDError("the disk is full: a line of the ledger could not be written")
    os.fsync(handle)
    return entry


def _parse(raw: bytes) -> LedgerEntry | None:
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and {"n", "previous", "hash"} <= entry.keys() else None


def _line(entry: LedgerEntry) -> bytes:
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode()


def _hash(entry: LedgerEntry) -> str:
    return hashlib.sha256(_line({key: entry[key] for key in entry if key != "hash"})).hexdigest()


def entry_lines(entries: list[LedgerEntry]) -> Iterator[str]:
    """Describe entries in lines: number, time, kind and content."""
    for entry in entries:
        fields = {key: entry[key] for key in entry if key not in ("n", "time", "kind", "previous", "hash")}
        text = "  ".join(f"{key} {json.dumps(value)}" for key, value in fields.items())
        yield f"{entry['n']:>6}  {entry['time']}  {entry['kind']:<12} {text}"
