"""Checksums of record lines: each line ends with a digest of itself and of the line before it.

    {"round":2,"accuracy":0.5,"digest":"0123456789abcdef"}

So a changed line, and a line without its predecessor, are found by their number. Lines that are missing at
the end are found by the checksums in summary.json. Lines without a digest are of older versions: they
are accepted before the first line that has one. A file that was cut after a line can be continued.
"""

from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal

FIELD = "digest"
DIGITS = 16
_MARK = f',"{FIELD}":"'.encode()
_END = b'"}'
_LENGTH = len(_MARK) + DIGITS + len(_END)

Verdict = Literal["sound", "changed"]


def sealed(line: bytes, previous: str) -> tuple[bytes, str]:
    """Put a digest at the end of a JSON object's text.

    Args:
        line: a JSON object with at least one field, without a newline.
        previous: digest of the line before; empty for the first.

    Returns:
        The text with the digest, and the digest.

    >>> sealed(b'{"round":1}', "")
    (b'{"round":1,"digest":"9a885dc99689ae6a"}', '9a885dc99689ae6a')
    """
    digest = _digest(line[:-1], previous)
    return line[:-1] + _MARK + digest.encode() + _END, digest


def split(line: bytes) -> tuple[bytes, str | None]:
    """Undo `sealed`: the text without the digest, and the digest, None if it has none."""
    line = line.rstrip(b"\r\n")
    at = len(line) - _LENGTH
    if at <= 0 or line[at : at + len(_MARK)] != _MARK or not line.endswith(_END):
        return line, None
    return line[:at] + b"}", line[at + len(_MARK) : -len(_END)].decode("ascii", "replace")


def checked(lines: Iterable[bytes]) -> Iterator[tuple[bytes, Verdict]]:
    """Yield every line without its digest, and whether it is as it was written."""
    previous: str | None = None
    for raw in lines:
        line, digest = split(raw)
        if digest is None:
            yield line, "sound" if previous is None else "changed"
            continue
        sound = digest == _digest(line[:-1], previous or "")
        yield line, "sound" if sound else "changed"
        previous = digest


def last_digest(file: Path) -> str:
    """Read the digest of the last line of a file; empty where there is none."""
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 2 * _LENGTH))
        return split(stream.read())[1] or ""


def _digest(body: bytes, previous: str) -> str:
    return sha256(previous.encode() + b"\n" + body).hexdigest()[:DIGITS]
