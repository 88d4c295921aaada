"""Registrations: which site has which key, in a file that the operator owns. One name, one key.

The file is the only truth: the server admits the keys that are in it now, under these names. So a lost
database loses no registration, and who is removed is out at once.

    [sites]
    alpha = "ecdsa-sha2-nistp384 AAAA..."
"""

import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedld.engine.backends.flower.wire import site_name
from fedld.errors import FedLDError
from fedld.records.writer import write_atomically

Keys = dict[str, bytes]


class Registrations:
    """Names and keys as they stand in the file, read again whenever it changes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read: tuple[int, Keys] = (-1, {})

    def keys(self) -> Keys:
        """Public keys by site name; a missing file has none."""
        try:
            changed = self.file.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._read[0]:
            self._read = (changed, _read(self.file))
        return self._read[1]

    def name(self, key: bytes) -> str | None:
        """Whose key this is."""
        return next((name for name, known in self.keys().items() if known == key), None)

    def add(self, name: str, key: Path) -> None:
        """Register a site; a name or a key that is there already is refused."""
        try:
            text = " ".join(key.read_text().split()[:2])
        except (OSError, UnicodeDecodeError):
            raise FedLDError(f"the key file '{key}' cannot be read") from None
        public = _key(site_name(name), text)
        with self._edit() as texts:
            known = self.keys()
            if name in known:
                raise FedLDError(f"'{name}' is registered already; to change its key, unregister it first")
            if other := self.name(public):
                raise FedLDError(f"this key is registered already, for '{other}'")
            texts[name] = text

    def remove(self, name: str) -> None:
        """Unregister a site: its key is refused from now on."""
        with self._edit() as texts:
            if name not in texts:
                raise FedLDError(f"there is no site '{name}' in '{self.file}'")
            del texts[name]

    @contextmanager
    def _edit(self) -> Iterator[dict[str, str]]:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.file.with_name(f".{self.file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            texts = _texts(self.file) if self.file.exists() else {}
            yield texts
            write_atomically(self.file, tomli_w.dumps({"sites": texts}).encode())
            self.file.chmod(0o600)
        finally:
            os.close(lock)


def _read(file: Path) -> Keys:
    mode = file.stat()
    if mode.st_uid != os.getuid() or stat.S_IMODE(mode.st_mode) & 0o022:
        raise FedLDError(f"'{file}' may be changed by others than you: chmod 600 it")
    keys = {site_name(name): _key(name, text) for name, text in _texts(file).items()}
    for name, key in keys.items():
        for other in keys:
            if other != name and keys[other] == key:
                raise FedLDError(f"'{name}' and '{other}' have the same key in '{file}'")
    return keys


def _texts(file: Path) -> dict[str, str]:
    try:
        sites = tomllib.loads(file.read_text())["sites"]
        return {str(name): str(text) for name, text in sites.items()}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, AttributeError):
        raise FedLDError(
            f"'{file}' is no file of registrations: it has a table [sites] of names and keys"
        ) from None


def _key(name: str, text: str) -> bytes:
    """A public key as Flower compares it."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise FedLDError(f"the key of '{name}' is not an OpenSSH public key") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedLDError(f"the key of '{name}' is not of the kind that `fedld site key` makes")
    return public_key_to_bytes(key)
