"""Flower wants a new program for every message; here it starts quickly, and it is fedld and nothing else.

This process has everything imported. It forks once for Flower's daemon (SuperLink or SuperNode), asks the
daemon through its Unix socket for tasks, and forks for every task. So a message costs milliseconds instead
of an import of PyTorch, and a task's token is in no command line.

The fork loads the installed fedld, whatever app was sent: a server cannot bring its own code to a site, nor a
stranger to the server.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import FrameType

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from fedld.deployment.grid import BoundedGrid
from fedld.deployment.unix_socket import allow_socket_paths, connect
from fedld.engine.backends.flower import internals
from fedld.engine.backends.processes import tune_process
from fedld.errors import FedLDError
from fedld.models import build

PAUSE = 0.2
"""Seconds before the next question for work, where the daemon did not answer the last one."""
ENTRY = {
    "clientapp": (internals.CLIENT_MAIN, "fedld.engine.backends.flower.site"),
    "serverapp": (internals.SERVER_MAIN, "fedld.deployment.server_app"),
}
Main = Callable[[], None]
Daemon = Callable[[Path], None]
Again = Callable[[int], bool]


def serve(app: str, daemon: Daemon, again: Again = lambda _: False) -> int:
    """Run one of Flower's daemons, and fork for every task that it has for `app`; the daemon's exit code.

    A daemon that ends although nobody told it to is started again if `again` says so. 0 if it was told to.
    """
    main = _only_fedld(app)
    _warm_up()
    with tempfile.TemporaryDirectory(prefix="fedld-") as folder:
        return _Supervisor(f"flwr-{app}", main, daemon, Path(folder) / "socket").run(again)


@dataclass
class _Supervisor:
    """The daemon and the tasks that run for it."""

    kind: str
    main: Main
    daemon: Daemon
    socket_path: Path
    process: int = 0
    stopping: bool = False
    tasks: set[int] = field(default_factory=set)

    def run(self, again: Again) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            while True:
                self.process = self._fork(lambda: self.daemon(self.socket_path), signal.SIGTERM)
                code = self._attend()
                self._end_tasks()
                if self.stopping:
                    return 0
                if not again(code):
                    return code
        finally:
            self._end_tasks()

    def _end_tasks(self) -> None:
        """A daemon's tasks end with it: to the next one they are strangers, and would say so at length."""
        for child in self.tasks:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.tasks = set()

    def _stop(self, number: int, _: FrameType | None) -> None:
        self.stopping = True
        if self.process:
            os.kill(self.process, signal.SIGTERM)

    def _attend(self) -> int:
        """Fork for every task until the daemon ends; its exit code."""
        client: RuntimeHttpClient | None = None
        request = AcquireTaskRequest(supported_task_types=[self.kind])
        while True:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.process = 0
                return os.waitstatus_to_exitcode(status)
            self.tasks = {child for child in self.tasks if os.waitpid(child, os.WNOHANG) == (0, 0)}
            token = None
            try:
                if client is None and self.socket_path.exists():
                    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
                    client = connect(RuntimeHttpClient, self.socket_path, [version])
                if client and not self.stopping:
                    token = client.AcquireTask(request).token  # held by the daemon until there may be a task
            except httpx.HTTPError:  # the daemon is not there yet, or no longer
                pass
            if token:
                words = ["--runtime-api-address", str(self.socket_path), "--token", token, "--insecure"]
                self.tasks.add(self._fork(partial(self._task, words), signal.SIGKILL))
            elif token is None:
                time.sleep(PAUSE)

    def _task(self, words: list[str]) -> None:
        sys.argv[1:] = words
        self.main()

    def _fork(self, main: Main, with_parent: signal.Signals) -> int:
        child = os.fork()
        if child == 0:
            _become(main, with_parent)
        return child


def _warm_up() -> None:
    """Let PyTorch import what it imports on first use; no backward pass, after which it forbids to fork."""
    tune_process()
    build("cnn", classes=2, channels=1, image_size=8, seed=0)


def _end_with_parent(by: signal.Signals) -> None:
    """Linux: when the process that started this one ends, however it ends, this one gets the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)


def _become(main: Main, with_parent: signal.Signals) -> None:
    """In the fork: be another program, and never come back.

    A site that is stopped stops at once: Flower's program would wait for a daemon that is gone.
    """
    _end_with_parent(with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    except FedLDError as error:
        print(f"fedld: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _only_fedld(app: str) -> Main:
    """Flower's own entry point of an app, with the ways to foreign code closed."""
    here = Path(str(files("fedld.deployment") / "app"))
    for place in (internals.CLIENT_INSTALL, internals.SERVER_INSTALL):
        place.replace(lambda *_, **__: None)
    for place in (internals.CLIENT_FOLDER, internals.SERVER_FOLDER, internals.LOADER_FOLDER):
        place.replace(lambda *_: here)
    internals.SERVER_GRID.replace(BoundedGrid)
    allow_socket_paths()
    entry, own = ENTRY[app]
    import_module(own)
    main: Main = entry.get()
    return main
