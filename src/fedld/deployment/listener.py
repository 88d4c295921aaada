"""Listeners of Flower's daemons: bounds on connections of unknown callers, and calls that wait for work.

Flower's programs ask for work again and again. Here a call that asks for work is held until there may be
some, or for `HOLD` seconds. So an idle server and an idle site do next to nothing and find work at once.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 16 << 10
"""Bytes of a request before its headers are complete."""
HEADER_SECONDS = 10.0
"""Time from the first byte of a request, or from the connection, until its headers are complete."""
HANDSHAKE_SECONDS = 10.0
"""Time of a TLS handshake."""
UNKNOWN = 128
"""Connections at a time that have not yet been answered as those of a registered site."""
UNKNOWN_PER_ADDRESS = 32
HOLD = 20.0
"""Seconds that a call for work is held; Flower's clients wait 30."""

CALLERS = 10_000
"""Callers that are remembered; without keys every connection is one."""

App = Callable[..., Any]


class BoundedLoop(asyncio.SelectorEventLoop):
    """An event loop of which TLS handshakes have little time; uvicorn has no setting for it."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Listen; with TLS a connection has `HANDSHAKE_SECONDS` to become one."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*args, **options)


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 without upgrades; drops connections that are too many or send their headers slowly.

    After a first answer that keeps the connection open the caller is known: refusals close it.
    """

    unknown: ClassVar[Counter[str]] = Counter()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._address: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; one of too many is dropped."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self.unknown.total() >= UNKNOWN or self.unknown[address] >= UNKNOWN_PER_ADDRESS:
            transport.abort()
            return
        self._address = address
        self.unknown[address] += 1
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_timer()
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, and watch how long incomplete headers take."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None and self.conn.trailing_data[0]:
            self._start_timer()

    def on_response_complete(self) -> None:
        """Mark the caller of a connection that stays open as registered."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._forget()

    def _should_upgrade(self) -> bool:
        return False

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        if self._address is not None:
            self.unknown[self._address] -= 1
            if not self.unknown[self._address]:
                del self.unknown[self._address]
            self._address = None


class Activity:
    """Counts what may have brought new work; callers wait until the count changes. Safe between threads."""

    def __init__(self) -> None:
        self.count, self.closed = 0, False
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lock = threading.Lock()

    def note(self) -> None:
        """Count new work, and wake the callers that wait."""
        with self._lock:
            self.count += 1
            for loop, event in self._waiting:
                loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        """Release all held calls: the listener stops."""
        self.closed = True
        self.note()

    async def changed(self, seen: int) -> None:
        """Return when the count is not `seen`, or the listener stops."""
        event = asyncio.Event()
        entry = asyncio.get_running_loop(), event
        with self._lock:
            self._waiting.add(entry)
        try:
            if self.count == seen and not self.closed:
                await event.wait()
        finally:
            with self._lock:
                self._waiting.discard(entry)


class Holding:
    """An ASGI application before another: calls to `waiting` paths wait for activity.

    Calls to `working` paths count as activity.
    A caller that was answered before the last activity is answered at once: nothing is missed in between.
    """

    def __init__(
        self, app: App, activity: Activity, waiting: frozenset[str], working: frozenset[str] = frozenset()
    ) -> None:
        self.app, self.activity, self.waiting, self.working = app, activity, waiting, working
        self._seen: dict[bytes, int] = {}

    async def __call__(self, scope: Any, receive: App, send: App) -> None:
        """Pass a call on, now or when there may be work; a call without a caller is dropped."""
        path = scope.get("path")
        if path in self.waiting:
            body = await _body(receive)
            caller = _caller(scope)
            if self._seen.get(caller) == self.activity.count and not await self._wait(receive):
                return
            await self._pass_on(caller, scope, _again(body, receive), send)
            return
        await self.app(scope, receive, send)
        if path in self.working:
            self.activity.note()

    async def _pass_on(self, caller: bytes, scope: Any, receive: App, send: App) -> None:
        """Answer; after an answer with work in it there may be more, so the next call is not held."""
        count, size = self.activity.count, 0

        async def counted(part: Any) -> None:
            nonlocal size
            size += len(part.get("body", b""))
            await send(part)

        await self.app(scope, receive, counted)
        if len(self._seen) > CALLERS:
            self._seen.clear()
        self._seen[caller] = -1 if size else count

    async def _wait(self, receive: App) -> bool:
        """Wait for work or the end of the time; tell whether the caller is still connected."""
        work = asyncio.ensure_future(self.activity.changed(self.activity.count))
        gone = asyncio.ensure_future(receive())
        done, rest = await asyncio.wait({work, gone}, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        return gone not in done


def _caller(scope: Any) -> bytes:
    """Identify the caller: a site by its key; without keys, one connection."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    return headers.get(b"flwr-public-key", repr(scope.get("client")).encode())


async def _body(receive: App) -> bytes:
    parts: list[bytes] = []
    while True:
        part = await receive()
        parts.append(part.get("body", b""))
        if not part.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: App) -> App:
    """Replay what was read already, then pass on what follows."""
    replayed = False

    async def read() -> Any:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read


class Listener(uvicorn.Server):
    """A listener that leaves signals to its process, and lets held calls go before it stops."""

    def __init__(self, config: uvicorn.Config, activity: Activity) -> None:
        super().__init__(config)
        self.activity = activity

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signals."""
        yield

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop, without waiting for calls that only wait."""
        self.activity.close()
        await super().shutdown(sockets)
