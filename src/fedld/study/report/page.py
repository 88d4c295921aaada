"""The page: one file, nothing from the network, every name escaped; and a server for it during a run."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from fedld import __version__
from fedld.errors import FedLDError
from fedld.records.reader import StudyRecords, read
from fedld.study.report.build import Group, Missing, build
from fedld.study.report.chart import Chart, css_variables
from fedld.study.report.tables import PageTable
from fedld.study.verdict import answers


def render(study: StudyRecords, groups: list[Group], *, live: bool = False) -> str:
    """Render the page of a study; a live one asks only its own server for changes."""
    script = asset("page.js") + (asset("live.js") if live else "")
    return _template().render(
        study=study,
        groups=groups,
        script=Markup(script),  # our own file: it holds no data
        policy=_policy(script, live),
        style=Markup(css_variables() + asset("page.css")),
        version=__version__,
    )


def _policy(script: str, live: bool) -> str:
    """Write the content policy: only our own script runs, and nothing is fetched from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """Read a file of the page: script, style or template."""
    return (files("fedld.study.report") / "assets" / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals = {"answers": answers, "svg": svg, "embed": embed}
    environment.globals |= {"kind": kind}
    return environment.from_string(asset("page.html"))


def svg(chart: Chart, prefix: str) -> Markup:
    """Draw a chart; matplotlib escapes every text in it, and the label is escaped here."""
    return Markup(chart.inline(prefix, str(escape(chart.summary))))


def embed(chart: Chart) -> Markup:
    """Encode data for the page's script. No '<' is left in it, so no name can close the element."""
    data: dict[str, Any] = {
        "name": chart.name,
        "title": chart.title,
        "hover": chart.hover,
        "heat": chart.heat,
    }
    if chart.heat is None:
        data |= {"columns": chart.columns, "rows": chart.rows}
    text = json.dumps(_short(data), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _short(value: Any) -> Any:
    """Round numbers to six significant digits; what is not finite becomes null, as JSON has no nan."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return [_short(item) for item in value] if isinstance(value, list | tuple) else value


def kind(block: object) -> str:
    """Name the kind of a block, for the template."""
    return {Chart: "chart", PageTable: "table", Missing: "missing"}.get(type(block), "other")


LOOPBACK = "127.0.0.1"
WATCHED = ("study.json", "config.toml", "rounds.jsonl", "summary.json")


class LivePage:
    """The page of some directories, drawn again only after their records have changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._lock = list(paths), threading.Lock()
        self._version, self._page = "", b""

    def version(self) -> str:
        """Compute a digest that changes whenever a record has grown."""
        digest = hashlib.sha256()
        for root in self._paths:
            for file in sorted(f for name in WATCHED for f in (root / name, *root.glob(f"runs/*/{name}"))):
                try:
                    status = file.stat()
                except OSError:
                    continue
                digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def page(self) -> tuple[str, bytes]:
        """Give version and content; one request draws, the others wait for it."""
        with self._lock:
            version = self.version()
            if version != self._version:
                study = read(self._paths)
                self._version, self._page = version, render(study, build(study), live=True).encode()
            return self._version, self._page


def make_server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Make a server on loopback, not started yet; port 0 takes a free one."""
    read(paths)  # a directory without a run is refused now, before the browser opens
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
