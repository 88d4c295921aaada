"""Files with a SHA-256 checksum in the first line."""

from hashlib import sha256
from pathlib import Path

from fedld.records.writer import write_atomically


def write_checksummed(path: Path, content: bytes) -> None:
    """Write a checksum and the content: to a file beside it, synced, then renamed."""
    write_atomically(path, sha256(content).hexdigest().encode() + b"\n" + content)


def read_checksummed(path: Path) -> bytes:
    """Read the content; ValueError if it does not match its checksum."""
    digest, _, content = path.read_bytes().partition(b"\n")
    if sha256(content).hexdigest().encode() != digest:
        raise ValueError("wrong checksum")
    return content
