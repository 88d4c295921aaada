"""Flower's SuperNode without a port: its runtime endpoint is a Unix socket."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from fedld.deployment.listener import Activity, Holding, Listener
from fedld.deployment.superlink import ACQUIRE
from fedld.engine.backends.flower import internals

POLL = 0.25
"""Seconds between a site's questions for work, each of which the server holds until there may be some."""


def run_supernode(words: list[str], socket_path: Path) -> None:
    """Ask the server for work until told to stop. `words` is the command line, without the program."""

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
    """A sentence where Python prints a traceback; the site connects again by itself."""
    print(f"fedld: the connection to the server broke: {failed.exc_value}", file=sys.stderr, flush=True)
