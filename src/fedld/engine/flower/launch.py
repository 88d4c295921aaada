"""SuperLink and SuperNode with safe defaults: TLS and node keys on, telemetry and update checks off."""

import ipaddress
import json
import socket
from dataclasses import dataclass
from pathlib import Path

from fedld.engine.flower import QUIET
from fedld.engine.flower.submit import program
from fedld.engine.flower.wire import site_name
from fedld.errors import FedLDError

POLLS = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}


@dataclass(frozen=True)
class Server:
    """How to run a SuperLink: where, with which certificate, and where its runs are written."""

    host: str
    port: int
    runs: Path
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    database: Path | None = None
    insecure: bool = False

    def command(self) -> list[str]:
        """The SuperLink's command line."""
        words = [program("flower-superlink"), "--host", self.host, "--port", str(self.port)]
        words += ["--disable-runtime-dependency-installation"]
        if self.insecure:
            _only_loopback(self.host)
            return [*words, "--insecure"]
        files = {"--ca": self.ca, "--certificate": self.certificate, "--key": self.key}
        ca, certificate, key = (_file(option, path) for option, path in files.items())
        words += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        database = self.database or self.runs / "superlink.db"
        database.parent.mkdir(parents=True, exist_ok=True)
        return [*words, "--enable-supernode-auth", "--database", str(database)]

    def start(self) -> int:
        """Run until stopped."""
        from fedld.engine.flower.warm import serve

        return serve("serverapp", self.command(), QUIET | POLLS | {"FEDLD_RUNS": str(self.runs.absolute())})


@dataclass(frozen=True)
class Node:
    """How to run a SuperNode: who the site is, where its data lies, and which server it trusts."""

    site: str
    data: Path
    superlink: str
    state: Path
    ca: Path | None = None
    key: Path | None = None
    device: str = "cpu"
    skip_bad: bool = False
    insecure: bool = False

    def command(self) -> list[str]:
        """The SuperNode's command line."""
        facts = {
            "site": site_name(self.site),
            "data": str(self.data.absolute()),
            "state": str(self.state.absolute()),
            "device": self.device,
            "skip-bad": self.skip_bad,
        }
        told = " ".join(f"{key}={json.dumps(value)}" for key, value in facts.items())
        words = [program("flower-supernode"), "--superlink", self.superlink, "--node-config", told]
        words += ["--port", str(free_port())]
        if self.insecure:
            _only_loopback(self.superlink.rpartition(":")[0])
            return [*words, "--insecure"]
        ca, key = _file("--ca", self.ca), _file("--key", self.key)
        return [*words, "--root-certificates", ca, "--auth-supernode-private-key", key]

    def start(self) -> int:
        """Run until stopped."""
        from fedld.engine.flower.warm import serve

        return serve("clientapp", self.command(), QUIET | POLLS)


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _only_loopback(host: str) -> None:
    try:
        near = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        near = False
    if not near:
        raise FedLDError(f"--insecure is for this machine only (127.0.0.1), not for '{host}'")


def _file(option: str, path: Path | None) -> str:
    if path is None:
        raise FedLDError(f"{option} is needed: connections are encrypted and sites known by their keys")
    if not path.is_file():
        raise FedLDError(f"{option}: there is no file '{path}'")
    return str(path)
