"""A site's journal of secure rounds: what it has done, written to disk before it answers.

Every step of a secure computation is taken once. The journal refuses a second one, also after a restart and
also from another process at the same site, because it is read and written under a lock. It has no secrets.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedld.errors import FedLDError


class Journal:
    """Steps taken, as lines of JSON in a file that only grows.

    Args:
        file: where it lies; made if absent.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "journal.jsonl"
    >>> Journal(file).take("sum 1", "unmask", "survivors a, b, c")
    >>> Journal(file).take("sum 1", "unmask", "survivors a, b")
    Traceback (most recent call last):
    fedld.errors.FedLDError: the step 'unmask' was already taken here: survivors a, b, c
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._taken: dict[tuple[str, str], str] = {}
        self._read_up_to = 0

    def take(self, subject: str, step: str, detail: str) -> None:
        """Write down that a step is taken now; on return it is on disk.

        Args:
            subject: what the step belongs to: the digest of a context, or a round of a run.
            step: its name.
            detail: what was decided in it.

        Raises:
            FedLDError: it was taken before, or the journal cannot be read or written.
        """
        with self._locked() as file:
            if (subject, step) in self._taken:
                raise FedLDError(f"the step '{step}' was already taken here: {self._taken[subject, step]}")
            line = json.dumps({"subject": subject, "step": step, "detail": detail}).encode() + b"\n"
            file.seek(self._read_up_to)
            file.truncate()  # the torn end of a line that a crash left: its step was never answered
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            self._taken[subject, step] = detail
            self._read_up_to += len(line)

    def detail(self, subject: str, step: str) -> str | None:
        """What was decided in a step, or None where it was not taken."""
        with self._locked():
            return self._taken.get((subject, step))

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, locked, with everything that it holds read."""
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise FedLDError(
                f"the journal of secure rounds '{self.file}' cannot be opened: {error.strerror}"
            ) from None
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._read(file)
            yield file

    def _read(self, file: BinaryIO) -> None:
        """Take in the whole lines that were written since the last time."""
        if os.fstat(file.fileno()).st_size < self._read_up_to:
            raise FedLDError(
                f"the journal of secure rounds '{self.file}' became shorter, so nothing is answered"
            )
        file.seek(self._read_up_to)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
                self._taken[entry["subject"], entry["step"]] = entry["detail"]
            except (ValueError, KeyError, TypeError):
                raise FedLDError(
                    f"the journal of secure rounds '{self.file}' is damaged, so nothing is answered"
                ) from None
            self._read_up_to += len(line)
