"""The report of a run while it goes on: a server for this machine's own browser, and for nobody else.

It answers three fixed paths and opens no file by a name that a request contains, so there is no path to
traverse. It listens on loopback only, and a page of another site that points a host name at loopback (DNS
rebinding) is refused by its Host header.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedld.errors import FedLDError
from fedld.records.reader import read
from fedld.study.report.build import build
from fedld.study.report.page import render

LOOPBACK = "127.0.0.1"
WATCHED = ("study.json", "config.toml", "rounds.jsonl", "summary.json")


class LivePage:
    """The page of some directories, drawn again only after their records have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._lock = list(paths), threading.Lock()
        self._version, self._page = "", b""

    def version(self) -> str:
        """Changes whenever a record has grown."""
        digest = hashlib.sha256()
        for root in self._paths:
            for file in sorted(f for name in WATCHED for f in (root / name, *root.glob(f"runs/*/{name}"))):
                try:
                    facts = file.stat()
                except OSError:
                    continue
                digest.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> tuple[str, bytes]:
        """Version and content; one request draws, the others wait for it."""
        with self._lock:
            version = self.version()
            if version != self._version:
                study = read(self._paths)
                self._version, self._page = version, render(study, build(study), live=True).encode()
            return self._version, self._page


def make_server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """A server on loopback, not started yet; port 0 takes a free one."""
    read(paths)  # a directory without a run is told now, not in the browser
    live = LivePage(paths)

    class Handler(_Handler):
        pages = live

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        raise FedLDError(f"cannot listen on port {port} of {LOOPBACK}: {error}") from None


def serve(paths: Sequence[Path], port: int = 0, *, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `ready` gets the address."""
    with make_server(paths, port) as server:
        ready(f"http://{LOOPBACK}:{server.server_port}/")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)


class _Handler(BaseHTTPRequestHandler):
    """GET and HEAD of / and /version; everything else is refused."""

    pages: LivePage
    server: ThreadingHTTPServer
    server_version, sys_version = "fedld", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a request."""
        if self.headers.get("Host") not in self._hosts():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers its own machine only\n")
        elif self.path == "/version":
            self._send(HTTPStatus.OK, "text/plain", self.pages.version().encode())
        elif self.path == "/":
            self._send_page()
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")

    do_HEAD = do_GET  # noqa: N815

    def _hosts(self) -> set[str]:
        return {f"{name}:{self.server.server_port}" for name in (LOOPBACK, "localhost")}

    def _send_page(self) -> None:
        try:
            version, page = self.pages.page()
        except FedLDError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{error}\n".encode())
        else:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page, version)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, version: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"X-Fedld-Version": version} if version else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet: the terminal shows the address only."""
