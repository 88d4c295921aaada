"""A file of JSON lines that only grows, shared by the processes of a site and safe against crashes."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedld.errors import FedLDError


class LockedLines:
    """Entries on disk, one JSON object a line. A line is on disk before `append` returns.

    The torn end of a line that a crash left is dropped; anything else that is no entry is refused.

    Args:
        file: where it lies; made if absent, readable by its owner alone.
        what: its name in messages.
    """

    def __init__(self, file: Path, what: str) -> None:
        self.file = file
        self.what = what
        self.entries: list[dict[str, Any]] = []
        self._read_up_to = 0

    @contextmanager
    def locked(self) -> Iterator["Appender"]:
        """Hold the file's lock, with all its entries read.

        Raises:
            FedLDError: the file cannot be opened, is damaged or became shorter.
        """
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FedLDError(f"{self.what} '{self.file}' cannot be opened: {error.strerror}") from None
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read(file)
            yield Appender(self, file)

    def _read(self, file: BinaryIO) -> None:
        """Take in the whole lines that were written since the last time."""
        if os.fstat(file.fileno()).st_size < self._read_up_to:
            raise FedLDError(f"{self.what} '{self.file}' became shorter, so nothing is answered")
        file.seek(self._read_up_to)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError:
                entry = None
            if not isinstance(entry, dict):
                raise FedLDError(f"{self.what} '{self.file}' is damaged, so nothing is answered")
            self.entries.append(entry)
            self._read_up_to += len(line)

    def write(self, file: BinaryIO, entry: dict[str, Any]) -> None:
        """Write an entry after the last whole line, to the disk itself; the lock is held."""
        line = json.dumps(entry).encode() + b"\n"
        file.seek(self._read_up_to)
        file.truncate()
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        self.entries.append(entry)
        self._read_up_to += len(line)


class Appender:
    """What the holder of the lock may do."""

    def __init__(self, lines: LockedLines, file: BinaryIO) -> None:
        self._lines = lines
        self._file = file

    def append(self, entry: dict[str, Any]) -> None:
        """Write an entry; on return it is on disk."""
        self._lines.write(self._file, entry)
