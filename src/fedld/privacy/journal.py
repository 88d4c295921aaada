"""A site's journal of secure rounds: what it has done, written to disk before it answers.

Every step of a secure computation is taken once. The journal refuses a second one, also after a restart and
also from another process at the same site, because it is read and written under a lock. It has no secrets.
"""

from pathlib import Path

from fedld.errors import FedLDError
from fedld.privacy.lines import LockedLines


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
        self._lines = LockedLines(file, "the journal of secure rounds")
        self._taken: dict[tuple[str, str], str] = {}
        self._indexed = 0

    def take(self, subject: str, step: str, detail: str) -> None:
        """Write down that a step is taken now; on return it is on disk.

        Args:
            subject: what the step belongs to: the digest of a context, or a round of a run.
            step: its name.
            detail: what was decided in it.

        Raises:
            FedLDError: it was taken before, or the journal cannot be read or written.
        """
        with self._lines.locked() as lines:
            self._index()
            if (subject, step) in self._taken:
                raise FedLDError(f"the step '{step}' was already taken here: {self._taken[subject, step]}")
            lines.append({"subject": subject, "step": step, "detail": detail})
            self._index()

    def detail(self, subject: str, step: str) -> str | None:
        """What was decided in a step, or None where it was not taken."""
        with self._lines.locked():
            self._index()
            return self._taken.get((subject, step))

    def _index(self) -> None:
        """Take in the entries that were read or written since the last time."""
        for entry in self._lines.entries[self._indexed :]:
            if not {"subject", "step", "detail"} <= set(entry):
                raise FedLDError(f"the journal of secure rounds '{self.file}' is damaged: no answer")
            self._taken[entry["subject"], entry["step"]] = entry["detail"]
            self._indexed += 1
