"""Flower's daemons: a SuperLink with one port for the sites, and a SuperNode without a port.

Control and runtime are Unix sockets.
"""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

from fedld.deployment.listener import (
    HEADER_BYTES,
    Activity,
    BoundedLoop,
    BoundedProtocol,
    Holding,
    Listener,
)
from fedld.deployment.registrations import FLEET, Admission, Keys, Registrations
from fedld.engine.backends.flower import internals
from fedld.errors import FedLDError

ACQUIRE = frozenset({"/v1/runtime/acquire-task"})
PULL = frozenset({FLEET + "pull-messages"})
NEW_WORK = frozenset(
    {
        *("/v1/control/start-run", "/v1/runtime/create-task"),
        *("/v1/runtime/push-messages", "/v1/runtime/push-object"),
    }
)
"""Calls of the operator and of runs after which a task or a message may be there."""


@dataclass(frozen=True)
class Stored:
    """The database of messages that are not read yet, and the largest number of its bytes."""

    database: Path
    room: float

    def full(self) -> bool:
        """Tell whether the database, with what is not yet merged into it, exceeds its limit."""
        files = (self.database, self.database.with_name(f"{self.database.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists()) > self.room


def run_superlink(
    words: list[str],
    registrations: Registrations | None,
    socket_path: Path,
    ready: Callable[[], None],
    stored: Stored,
) -> None:
    """Serve until stopped. `words` is the SuperLink's command line, without the program."""
    sys.argv = ["flower-superlink", *words]
    config = internals.SUPERLINK_CONFIG.get()()
    app = internals.SUPERLINK_APP.get()(config, internals.SUPERLINK_LIFESPAN.get())
    state = internals.link_state(app)
    keys = _registrar(registrations, state) if registrations else None
    activity = Activity()
    socket_app = Holding(app, activity, ACQUIRE, NEW_WORK)
    sites_app = Holding(app, activity, PULL)
    admission = Admission(sites_app, keys, partial(_renew, state), stored.full, room=stored.room)
    common: dict[str, Any] = {"access_log": False, "log_level": "warning", "workers": 1, "ws": "none"}
    inside = Listener(uvicorn.Config(socket_app, uds=str(socket_path), **common), activity)
    outside_config = uvicorn.Config(
        admission,
        host=config.host,
        port=config.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        lifespan="off",
        http=BoundedProtocol,
        h11_max_incomplete_event_size=HEADER_BYTES,
        **common,
    )
    outside = Listener(outside_config, activity)
    with asyncio.Runner(loop_factory=BoundedLoop) as runner:
        runner.run(_serve([inside, outside], ready))


async def _serve(listeners: list[Listener], ready: Callable[[], None]) -> None:
    def stop() -> None:
        for listener in listeners:
            listener.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    tasks = [asyncio.create_task(listener.serve()) for listener in listeners]
    while not all(listener.started for listener in listeners) and not any(task.done() for task in tasks):
        await asyncio.sleep(0.05)
    if all(listener.started for listener in listeners):
        ready()
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop()
    await asyncio.gather(*tasks)


def _renew(state: Any, key: bytes) -> None:
    """Deactivate the old registration of a site that was killed and starts again."""
    node = state.get_node_id_by_public_key(key)
    if node is not None:
        state.deactivate_node(node)


def _registrar(registrations: Registrations, state: Any) -> Callable[[], Keys]:
    """Make a reader of the registered keys; a key that is new in the file is added to Flower's state."""
    registered: Keys = {}

    def keys() -> Keys:
        nonlocal registered
        try:
            current = registrations.keys()
        except FedLDError as error:
            print(
                f"fedld: {error}; no site is admitted until the file is corrected",
                file=sys.stderr,
                flush=True,
            )
            return {}
        if current is not registered:
            for name, key in current.items():
                if state.get_node_id_by_public_key(key) is None:
                    interval = HEARTBEAT_DEFAULT_INTERVAL
                    state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, interval, name=name)
            registered = current
        return current

    keys()
    return keys


POLL = 0.25
"""Seconds between a site's questions for work, each of which the server holds until there may be some."""


def run_supernode(words: list[str], socket_path: Path) -> None:
    """Ask the server for work until stopped. `words` is the command line, without the program."""

    activity = Activity()

    def start(_: Any, state_factory: Any) -> tuple[uvicorn.Server, threading.Thread]:
        app = Holding(internals.SUPERNODE_APP.get()(state_factory=state_factory), activity, ACQUIRE)
        config = uvicorn.Config(app, uds=str(socket_path), access_log=False, log_level="warning", ws="none")
        server = Listener(config, activity)
        thread = threading.Thread(target=server.run, name="socket")
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.05)
        return server, thread

    main, pull = internals.SUPERNODE_MAIN.get(), internals.SUPERNODE_PULL.get()

    def noted(**options: Any) -> int | None:
        run: int | None = pull(**options)
        if run is not None:
            activity.note()
        return run

    internals.SUPERNODE_HTTP.replace(start)
    internals.SUPERNODE_TIME.replace(SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL))))
    internals.SUPERNODE_PULL.replace(noted)
    threading.excepthook = (
        _say  # Flower's heartbeat ends by an exception when the server knows the site no more
    )
    sys.argv = ["flower-supernode", *words]
    main()


def _say(failed: threading.ExceptHookArgs) -> None:
    """Print a sentence in place of a traceback; the site connects again by itself."""
    print(f"fedld: the connection to the server broke: {failed.exc_value}", file=sys.stderr, flush=True)
