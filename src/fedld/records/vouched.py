"""Files that vouch for themselves: a SHA-256 digest, a newline, and the bytes it was made of."""

from hashlib import sha256
from pathlib import Path

from fedld.records.writer import write_atomically


def write_vouched(path: Path, content: bytes) -> None:
    """Write content under its digest: aside, synced, renamed."""
    write_atomically(path, sha256(content).hexdigest().encode() + b"\n" + content)


def read_vouched(path: Path) -> bytes:
    """The content, or ValueError if a single bit of it is not as it was written."""
    digest, _, content = path.read_bytes().partition(b"\n")
    if sha256(content).hexdigest().encode() != digest:
        raise ValueError("wrong checksum")
    return content
