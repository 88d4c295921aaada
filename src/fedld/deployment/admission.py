"""Admission to the sites' port: Flower's fleet calls from registered keys pass, nothing else does.

Flower serves tasks, administration and sites on one port. Only the sites' calls are let through here; a
stranger is turned away before a byte of what it sends is read.
"""

import binascii
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

from fedld.deployment.registrations import Keys

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

    `renew` is told the key of a site that starts: Flower would believe it to be there still, for a minute.
    `full` says whether what sites sent fills the room that the server has for it. Then who sent more than an
    equal share of `room` bytes sends nothing more; Flower removes replies when they are read and runs end.
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
        """Whether there is no room left, and this site has had more than its share of it."""
        self.sent[key] += size
        return self.sent[key] > self.room / max(sites, 1) and self.full()


def _unsigned(headers: dict[str, str], keys: Keys) -> str | None:
    """Why a call is not signed by a registered key just now; None if it is."""
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
    """What a call sends, cut off where it becomes too large, whatever length it announced."""
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
