"""A Unix socket in a folder that only its owner can enter.

Flower's control and runtime endpoints do not authenticate callers. On such a socket the operating system
does: only the account that started the server (or the site), and root, can open it.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
from flwr.supercore.protobuf.client import ProtobufClient

from fedld.engine.backends.flower import internals
from fedld.errors import FedLDError

C = TypeVar("C", bound=ProtobufClient)
TIMEOUT = 30.0


def connect(kind: type[C], socket_path: Path, interceptors: Sequence[Any] = (), retry: Any = None) -> C:
    """Make a client of Flower that uses a Unix socket."""
    check_socket(socket_path)
    client = kind("http://localhost", interceptors=interceptors, verify=False, retry_invoker=retry)
    transport = httpx.HTTPTransport(uds=str(socket_path))
    internals.use_http_client(client, httpx.Client(transport=transport, timeout=TIMEOUT))
    return client


def check_socket(socket_path: Path) -> None:
    """Refuse a socket in a folder that others can enter, wherever its path was read."""
    try:
        folder = socket_path.parent.stat()
    except OSError:
        raise FedLDError(f"there is no server behind '{socket_path}'") from None
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) != 0o700:
        raise FedLDError(f"'{socket_path.parent}' is not a folder of yours alone")


def allow_socket_paths() -> None:
    """Let Flower's programs take a path where they expect HOST:PORT."""
    usual = internals.CLIENT_ADDRESS.get().__func__

    def from_server_address(
        cls: type[C],
        server_address: str,
        insecure: bool,
        root_certificates: bytes | str | None,
        interceptors: Sequence[Any],
        *,
        retry_invoker: Any = None,
    ) -> C:
        if server_address.startswith("/"):
            return connect(cls, Path(server_address), interceptors, retry_invoker)
        made: C = usual(
            cls,
            server_address,
            insecure,
            root_certificates,
            interceptors,
            retry_invoker=retry_invoker,
        )
        return made

    internals.CLIENT_ADDRESS.replace(classmethod(from_server_address))
