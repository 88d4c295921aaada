"""Flower starts a new program for every message; here it starts quickly, and it is fedld and nothing else.

Flower's daemons find `flwr-clientapp` and `flwr-serverapp` on the PATH. We put small programs of these names
in front: they pass their arguments to a process that has everything imported, which forks. So a message costs
milliseconds instead of an import of PyTorch.

The fork loads the installed fedld, whatever app was sent: a server cannot bring its own code to a site, nor a
stranger to the server.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from fedld.engine.processes import tune_process
from fedld.errors import FedLDError
from fedld.models import build

SHIM = """#!{python} -SE
import json, socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.connect({door!r})
    door.sendall(json.dumps(sys.argv[1:]).encode())
"""
REFUSED = "#!/bin/sh\necho 'fedld starts no other Flower app' >&2\nexit 1\n"
PROGRAMS = ("agentapp", "clientapp", "connector", "model", "serverapp", "simulation")
ENTRY = {
    "clientapp": ("flwr.supernode.cli.flwr_clientapp", "fedld.engine.flower.site"),
    "serverapp": ("flwr.superlink.cli.flwr_serverapp", "fedld.engine.flower.server"),
}
Main = Callable[[], None]


def serve(app: str, daemon: list[str], environment: Mapping[str, str]) -> int:
    """Run one of Flower's daemons, and fork for every `app` it wants to start; the daemon's exit code."""
    main = _only_fedld(app)
    _warm_up()
    os.environ.update(environment)
    with tempfile.TemporaryDirectory(prefix="fedld-") as folder, socket.socket(socket.AF_UNIX) as door:
        _shims(Path(folder), app)
        door.bind(f"{folder}/door")
        door.listen()
        path = os.pathsep.join([folder, str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        process = subprocess.Popen(daemon, env=os.environ | {"PATH": path}, preexec_fn=_end_with_parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: process.send_signal(number))
        try:
            return _fork_on_demand(door, process, main)
        finally:
            process.kill()


def _warm_up() -> None:
    """Let PyTorch import what it imports on first use; no backward pass, after which it forbids to fork."""
    tune_process()
    build("cnn", classes=2, channels=1, image_size=8, seed=0)


def _shims(folder: Path, app: str) -> None:
    """Programs that Flower will find first: ours for the app, a refusal for all others."""
    for name in PROGRAMS:
        file = folder / f"flwr-{name}"
        file.write_text(SHIM.format(python=sys.executable, door=f"{folder}/door") if name == app else REFUSED)
        file.chmod(0o700)


def _end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Linux: when the process that started this one ends, however it ends, this one gets the signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)


def _fork_on_demand(door: socket.socket, process: "subprocess.Popen[bytes]", main: Main) -> int:
    door.settimeout(0.5)
    children: set[int] = set()
    while process.poll() is None:
        children = {child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)}
        try:
            caller, _ = door.accept()
        except TimeoutError:
            continue
        with caller:
            arguments = json.loads(caller.makefile().read())
        child = os.fork()
        if child == 0:
            door.close()
            _become(main, arguments)
        children.add(child)
    return process.returncode


def _become(main: Main, arguments: list[str]) -> None:
    """In the fork: be the program that Flower wanted to start, and never come back.

    A site that is stopped stops at once: Flower's program would wait for a daemon that is gone.
    """
    _end_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv[1:] = arguments
    code: object = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _only_fedld(app: str) -> Main:
    """Flower's own entry point of an app, with the ways to foreign code closed."""
    here = Path(str(files("fedld.engine.flower") / "app"))
    for place, name, replacement in (
        ("flwr.supernode.runtime.run_clientapp", "install_from_fab", lambda *_, **__: None),
        ("flwr.superlink.runtime.run_serverapp", "install_from_fab", lambda *_, **__: None),
        ("flwr.supernode.runtime.run_clientapp", "get_project_dir", lambda *_: here),
        ("flwr.superlink.runtime.run_serverapp", "get_project_dir", lambda *_: here),
        ("flwr.clientapp.utils", "get_project_dir", lambda *_: here),
    ):
        module = import_module(place)
        if not hasattr(module, name):
            raise FedLDError(f"this version of Flower has no {place}.{name}; fedld is made for flwr 1.41")
        setattr(module, name, replacement)
    entry, own = ENTRY[app]
    import_module(own)
    main: Main = getattr(import_module(entry), f"flwr_{app}")
    return main
