"""Flower's SuperNode without a port: its runtime endpoint is a Unix socket."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.supernode.cli import flower_supernode as cli
from flwr.supernode.main import create_app

from fedld.deployment.listener import Activity, Holding, Listener
from fedld.deployment.superlink import ACQUIRE

POLL = 0.25
"""Seconds between a site's questions for work, each of which the server holds until there may be some."""


def run_supernode(words: list[str], socket_path: Path) -> None:
    """Ask the server for work until told to stop. `words` is the command line, without the program."""

    activity = Activity()

    def start(_: Any, state_factory: Any) -> tuple[uvicorn.Server, threading.Thread]:
        app = Holding(create_app(state_factory=state_factory), activity, ACQUIRE)
        config = uvicorn.Config(app, uds=str(socket_path), access_log=False, log_level="warning", ws="none")
        server = Listener(config, activity)
        thread = threading.Thread(target=server.run, name="socket")
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.05)
        return server, thread

    sys.modules["flwr.supernode.cli.flower_supernode"]._start_supernode_http_api = start  # type: ignore[attr-defined]
    loop = sys.modules["flwr.supernode.start_client_internal"]
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL)))  # type: ignore[attr-defined]
    pull = loop._pull_and_store_message

    def noted(**options: Any) -> int | None:
        run: int | None = pull(**options)
        if run is not None:
            activity.note()
        return run

    loop._pull_and_store_message = noted  # type: ignore[attr-defined]
    threading.excepthook = (
        _say  # Flower's heartbeat ends by an exception when the server knows the site no more
    )
    sys.argv = ["flower-supernode", *words]
    cli()


def _say(failed: threading.ExceptHookArgs) -> None:
    """A sentence where Python prints a traceback; the site connects again by itself."""
    print(f"fedld: the connection to the server broke: {failed.exc_value}", file=sys.stderr, flush=True)
