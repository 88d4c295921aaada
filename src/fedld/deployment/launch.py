"""Server and site with safe defaults: TLS and node keys on, telemetry off, files private; their log files.

The log file holds whatever a server's or site's processes print, with the time in UTC and without colours. A
separate process writes it, so that it also has the last lines of processes that died. A full file becomes
NAME.1, NAME.1 becomes NAME.2, and the oldest is deleted.
"""

import fcntl
import ipaddress
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, cast

from fedld import __version__
from fedld.deployment.registrations import Registrations
from fedld.engine.backends.flower.federation import FileFacts
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.backends.flower.wire import site_name
from fedld.errors import FedLDError
from fedld.privacy.peers import PEERS, open_peers
from fedld.privacy.policy import POLICY, read_policy
from fedld.records.writer import dump, write_atomically

AGAIN = 5.0


@dataclass(frozen=True, kw_only=True)
class FlowerServer:
    """How to run a SuperLink: where, with which certificate, and where its runs are written."""

    host: str
    port: int
    runs: Path
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    database: Path | None = None
    insecure: bool = False
    disk_gb: float = 50.0

    def words(self) -> list[str]:
        """Give the SuperLink's command line."""
        words = ["--host", self.host, "--port", str(self.port), "--isolation", "process"]
        words += ["--disable-runtime-dependency-installation"]
        if self.insecure:
            _only_loopback(self.host)
            return [*words, "--insecure"]
        files = {"--ca": self.ca, "--certificate": self.certificate, "--key": self.key}
        ca, certificate, key = (_file(option, path) for option, path in files.items())
        words += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        return [*words, "--enable-supernode-auth", "--database", str(self._database())]

    def start(self) -> int:
        """Run until stopped."""
        words = self.words()
        registrations = None if self.insecure else Registrations(registrations_file(self.runs))
        if registrations is not None:
            registrations.keys()
        os.umask(0o077)
        private_folder(self.runs)
        with locked(self.runs, "server"), logged(self.runs / "server.log"):
            return self._serve(words, registrations)

    def _serve(self, words: list[str], registrations: Registrations | None) -> int:
        from fedld.deployment.daemons import Stored, run_superlink
        from fedld.deployment.supervisor import serve

        if not self.insecure and self._database().exists():
            self._database().chmod(0o600)
        os.environ |= {"FEDLD_RUNS": str(self.runs.absolute())}
        if registrations is not None:
            os.environ["FEDLD_REGISTRATIONS"] = str(registrations.file.absolute())
        pid, stored = os.getpid(), Stored(self._database(), self.disk_gb * 1e9)

        def daemon(socket_path: Path) -> None:
            run_superlink(
                words,
                registrations,
                socket_path,
                ready=lambda: self._ready(socket_path, pid),
                stored=stored,
            )

        try:
            return serve("serverapp", daemon)
        finally:
            presence_file(self.runs).unlink(missing_ok=True)

    def _ready(self, socket_path: Path, pid: int) -> None:
        fields = {"socket": str(socket_path), "address": f"{self.host}:{self.port}"}
        write_presence(presence_file(self.runs), pid, **fields)
        scheme = "http" if self.insecure else "https"
        print(f"fedld server is ready for sites at {scheme}://{self.host}:{self.port}", flush=True)

    def _database(self) -> Path:
        return self.database or self.runs / "superlink.db"


@dataclass(frozen=True, kw_only=True)
class Node:
    """How to run a SuperNode: who the site is, where its data lies, and which server it trusts."""

    site: str
    data: Path
    superlink: str
    state: Path
    ca: Path | None = None
    key: Path | None = None
    device: str = "cpu"
    files: FileFacts = field(default_factory=FileFacts)
    insecure: bool = False
    weights: Path | None = None
    limits: Limits = field(default_factory=Limits)
    policy: Path | None = None
    peers: Path | None = None
    peer_key: Path | None = None

    def words(self) -> list[str]:
        """Give the SuperNode's command line."""
        config: dict[str, Any] = {
            "site": site_name(self.site),
            "data": str(self.data.absolute()),
            "state": str(self.state.absolute()),
            "device": self.device,
            **self.files.told(),
            **({"weights": str(self.weights.absolute())} if self.weights else {}),
            **self.limits.told(),
            "policy": self.policy is not None,
            **({"peer-key": str(self._own_peer_key().absolute())} if self.peers else {}),
        }
        node_config = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        words = ["--superlink", self.superlink, "--node-config", node_config, "--isolation", "process"]
        if self.insecure:
            _only_loopback(self.superlink.rpartition(":")[0])
            return [*words, "--insecure"]
        ca, key = _file("--ca", self.ca), _file("--key", self.key)
        return [*words, "--root-certificates", ca, "--auth-supernode-private-key", key]

    def start(self) -> int:
        """Run until stopped; a connection that the server no longer knows is made anew."""
        words = self.words()
        if self.policy is not None:
            read_policy(self.policy)
        if self.peers is not None:
            open_peers(self.site, self._own_peer_key(), self.peers)
        self._admitted()
        os.umask(0o077)
        folder = self.state / self.site
        private_folder(folder)
        if self.policy is not None:
            write_atomically(folder / POLICY, self.policy.read_bytes())
        if self.peers is not None:
            write_atomically(folder / PEERS, self.peers.read_bytes())
        with locked(folder, "site"), logged(folder / "site.log"):
            return self._serve(words, presence_file(folder))

    def _serve(self, words: list[str], presence: Path) -> int:
        from fedld.deployment.daemons import run_supernode
        from fedld.deployment.supervisor import serve

        write_presence(presence, os.getpid(), server=self.superlink)
        try:
            return serve("clientapp", lambda socket_path: run_supernode(words, socket_path), self._again)
        finally:
            presence.unlink(missing_ok=True)

    def _own_peer_key(self) -> Path:
        """Find the site's key for secure rounds: as named, or beside the key that the server knows."""
        if self.peer_key is None and self.key is None:
            raise FedLDError("--peers needs this site's key for secure rounds: --peer-key NAME.peer.key")
        return self.peer_key or cast(Path, self.key).with_name(f"{self.site}.peer.key")

    def _again(self, _: int) -> bool:
        time.sleep(AGAIN)
        self._admitted()
        print(
            f"fedld: the connection to '{self.superlink}' ended; connecting again",
            file=sys.stderr,
            flush=True,
        )
        return True

    def _admitted(self) -> None:
        """Check that the server admits the key, and name the remedy before Flower prints its own error."""
        if self.insecure or self.key is None or self.ca is None:
            return
        from fedld.deployment.registrations import check_registration

        refusal = check_registration(self.superlink, self.ca, self.key)
        if refusal and "not registered" in refusal:
            raise FedLDError(
                f"the key of '{self.site}' is not registered at the server '{self.superlink}': send "
                f"{self.key.with_suffix('.pub').name} to its operator, who types `fedld server register`"
            )
        if refusal:
            raise FedLDError(f"the server '{self.superlink}' refuses '{self.site}': {refusal}")


def registrations_file(runs: Path) -> Path:
    """Locate the file in which a server's operator keeps names and keys."""
    return runs / "sites.toml"


def presence_file(folder: Path) -> Path:
    """Locate the file that a server or site has while it runs."""
    return folder / "running.json"


def write_presence(file: Path, pid: int, **fields: str) -> None:
    """Say that a server or site runs, since when, and how to reach it."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    write_atomically(file, dump({"pid": pid, "since": since, "version": __version__, **fields}).encode())


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise FedLDError(f"'{folder}' cannot be made private: {error.strerror}") from None


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the folder of a server or site, so that no second one writes to it.

    Raises:
        FedLDError: another process holds it.
    """
    lock = os.open(folder / ".running.lock", os.O_RDWR | os.O_CREAT, 0o600)
    end = time.monotonic() + AGAIN  # the processes of one that was killed may take a moment to end
    try:
        while not _taken(lock):
            if time.monotonic() > end:
                raise FedLDError(f"another {what} runs in '{folder}': stop it first")
            time.sleep(0.2)
        yield
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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


LARGEST = 10 << 20
"""Bytes of one file."""
KEPT = 5
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@contextmanager
def logged(file: Path, largest: int = LARGEST) -> Iterator[None]:
    """Copy the output of this process and of its children to the log file as well."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    writer = os.fork()
    if writer == 0:
        os.close(writing)
        try:
            _write(reading, file, largest)
        finally:
            os._exit(0)
    os.close(reading)
    before = {number: os.dup(number) for number in (1, 2)}
    for number in before:
        os.dup2(writing, number)
    os.close(writing)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in before.items():
            os.dup2(saved, number)
            os.close(saved)
        os.waitpid(writer, 0)


def _write(reading: int, file: Path, largest: int) -> None:
    """Write lines until all printing processes have ended, also after a signal to their group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.raiseExceptions = False  # a full disk ends no server
    handler = RotatingFileHandler(file, maxBytes=largest, backupCount=KEPT, encoding="utf-8", delay=True)
    form = logging.Formatter("%(asctime)s.%(msecs)03dZ  %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    handler.setFormatter(form)
    coloured = os.isatty(1)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            plain = COLOUR.sub("", line.rstrip("\n"))
            if plain.strip():
                handler.emit(logging.makeLogRecord({"msg": plain}))
            try:
                os.write(1, (line if coloured else f"{plain}\n").encode())
            except OSError:
                coloured = False  # the terminal is closed
