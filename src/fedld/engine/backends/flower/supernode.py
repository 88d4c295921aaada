"""Flower's SuperNode without a port: its runtime endpoint is behind a door."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from flwr.supernode.cli import flower_supernode as cli
from flwr.supernode.main import create_app

POLL = 0.5
"""Seconds between a site's questions for work; Flower's three would be most of a small round."""


def run_supernode(words: list[str], door: Path) -> None:
    """Ask the server for work until told to stop. `words` is the command line, without the program."""

    def start(_: Any, state_factory: Any) -> tuple[uvicorn.Server, threading.Thread]:
        app = create_app(state_factory=state_factory)
        server = uvicorn.Server(uvicorn.Config(app, uds=str(door), access_log=False, log_level="warning"))
        thread = threading.Thread(target=server.run, name="door")
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.05)
        return server, thread

    sys.modules["flwr.supernode.cli.flower_supernode"]._start_supernode_http_api = start  # type: ignore[attr-defined]
    loop = sys.modules["flwr.supernode.start_client_internal"]
    loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, POLL)))  # type: ignore[attr-defined]
    threading.excepthook = (
        _say  # Flower's heartbeat ends by an exception when the server knows the site no more
    )
    sys.argv = ["flower-supernode", *words]
    cli()


def _say(failed: threading.ExceptHookArgs) -> None:
    """A sentence where Python prints a traceback; the site connects again by itself."""
    print(f"fedld: the connection to the server broke: {failed.exc_value}", file=sys.stderr, flush=True)
