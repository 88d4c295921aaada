"""Registrations: which site has which key, in a file that the operator owns; and admission by these keys.

The file is the only truth: the server admits the keys that are in it now, under these names. So a lost
database loses no registration, and a site that is removed is refused at once.

    [sites]
    alpha = "ecdsa-sha2-nistp384 AAAA..."

Flower serves tasks, administration and sites on one port. Only the sites' calls, signed by registered keys,
are let through; other calls are refused before their body is read.
"""

import binascii
import fcntl
import os
import ssl
import stat
import tomllib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import tomli_w
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    sign_message,
    verify_signature,
)

from fedld.engine.backends.flower.wire import site_name
from fedld.errors import FedLDError, printable
from fedld.records.writer import write_atomically

Keys = dict[str, bytes]


class Registrations:
    """Names and keys as they stand in the file, read again whenever it changes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read: tuple[int, Keys] = (-1, {})

    def keys(self) -> Keys:
        """Read public keys by site name; a missing file has none."""
        try:
            changed = self.file.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if changed != self._read[0]:
            self._read = (changed, _read(self.file))
        return self._read[1]

    def name(self, key: bytes) -> str | None:
        """Find the site with this key; None without one."""
        return next((name for name, registered in self.keys().items() if registered == key), None)

    def add(self, name: str, key: Path) -> None:
        """Register a site; a name or a key that is there already is refused."""
        try:
            text = " ".join(key.read_text().split()[:2])
        except (OSError, UnicodeDecodeError):
            raise FedLDError(f"the key file '{key}' cannot be read") from None
        public = _key(site_name(name), text)
        with self._edit() as texts:
            registered = self.keys()
            if name in registered:
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
    """Parse a public key into the form that Flower compares."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise FedLDError(f"the key of '{name}' is not an OpenSSH public key") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedLDError(f"the key of '{name}' is not of the kind that `fedld site key` makes")
    return public_key_to_bytes(key)


FLEET = "/v1/fleet/"
CALLS = frozenset(
    {
        *("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages"),
        *("get-run", "get-fab", "push-object", "pull-object", "confirm-message-received"),
    }
)
CHECK = FLEET + "check-registration"
"""A call of fedld's own: does the server know this key? Flower never sees it."""
PUSHES = frozenset({FLEET + "push-messages", FLEET + "push-object"})
SELF_REGISTRATION = frozenset({"register-node", "unregister-node"})
LARGEST = 32 << 20
"""Bytes of one call: Flower divides arrays into smaller pieces."""

App = Callable[..., Any]


class Admission:
    """An ASGI application before Flower's; `keys` gives the registered keys, None lets every key in.

    `renew` gets the key of a site that starts: Flower would count it as present, for a minute.
    `full` tells whether the messages of sites fill the server's room for them. Then a site that sent more
    than an equal share of `room` bytes is refused; Flower removes replies when they are read and runs end.
    """

    def __init__(
        self,
        app: App,
        keys: Callable[[], Keys] | None,
        renew: Callable[[bytes], None] = lambda _: None,
        full: Callable[[], bool] = lambda: False,
        room: float = 0.0,
    ) -> None:
        self.app, self.keys, self.renew, self.full, self.room = app, keys, renew, full, room
        self.sent: Counter[bytes] = Counter()
        self.calls = {FLEET + call for call in (CALLS if keys else CALLS | SELF_REGISTRATION)}

    async def __call__(self, scope: Any, receive: App, send: App) -> None:
        """Let a call pass, or answer it here."""
        if scope["type"] != "http":
            return
        if refusal := self._refusal(scope):
            await _answer(send, *refusal)
            return
        if scope["path"] == CHECK:
            await _answer(send, 200, "this key is registered at the server")
            return
        await self.app(scope, _bounded(receive), send)

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        if scope["method"] != "POST" or scope["path"] not in self.calls | {CHECK}:
            return 404, "there is nothing here"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        length = headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 12 or int(length) > LARGEST:
            return 413, "this call is too large"
        if self.keys is not None:
            keys = self.keys()
            if problem := _unsigned(headers, keys):
                return 401, problem
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER])
            if scope["path"] == FLEET + "activate-node":
                self.renew(key)
            if scope["path"] in PUSHES and self._too_much(key, int(length), len(keys)):
                return 507, "the server has no room for more replies of this site"
        return None

    def _too_much(self, key: bytes, size: int, sites: int) -> bool:
        """Tell whether the room is used up and this site has had more than its share of it."""
        self.sent[key] += size
        return self.sent[key] > self.room / max(sites, 1) and self.full()


def _unsigned(headers: dict[str, str], keys: Keys) -> str | None:
    """Explain why a call is not signed by a registered key just now; None if it is."""
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        moment = headers[TIMESTAMP_HEADER]
        if key not in keys.values():
            return "this key is not registered at the server"
        if not verify_signature(bytes_to_public_key(key), moment.encode("ascii"), signature):
            return "the signature is wrong"
        age = (now() - datetime.fromisoformat(moment)).total_seconds()
    except (KeyError, ValueError, TypeError, binascii.Error):
        return "this call is not signed"
    if -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        return None
    return f"the site's clock is off by {-age:.0f} s"


def _bounded(receive: App) -> App:
    """Cut a call off where it becomes too large, whatever length it announced."""
    seen = 0

    async def read() -> Any:
        nonlocal seen
        part = await receive()
        seen += len(part.get("body", b""))
        return part if seen <= LARGEST else {"type": "http.disconnect"}

    return read


async def _answer(send: App, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


def check_registration(server: str, ca: Path, key: Path) -> str | None:
    """Ask the server whether it admits a key; gives its refusal, None without one or without an answer."""
    try:
        private = load_ssh_private_key(key.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise FedLDError(f"'{key}' is not a key that `fedld site key` made")
    moment = now().isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        TIMESTAMP_HEADER: moment,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, moment.encode())).decode(),
    }
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError):
        raise FedLDError(f"'{ca}' is not a certificate (PEM)") from None
    try:
        answer = httpx.post(
            f"https://{server}{CHECK}", headers=headers, content=b"", verify=context, timeout=10
        )
    except httpx.ConnectError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise FedLDError(f"the certificate of '{server}' was not signed by '{ca}': {error}") from None
        return None
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    plain = answer.headers["content-type"] == "text/plain"  # by our admission, not by Flower
    return printable(answer.text) if plain and answer.status_code == httpx.codes.UNAUTHORIZED else None
