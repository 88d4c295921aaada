"""The operator's side of a running server, through its Unix socket: submit, follow, stop, status."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, cast

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedld.config.experiment import Experiment
from fedld.deployment.launch import presence_file, registrations_file
from fedld.deployment.registrations import Registrations
from fedld.deployment.unix_socket import connect
from fedld.engine.backends.flower.engine import again
from fedld.errors import FedLDError, Interrupted
from fedld.privacy.budget import SPENT, spent_line
from fedld.records.ledger import Ledger, entry_lines
from fedld.records.reader import read_records
from fedld.records.schema import ROUNDS, Event, Summary


def presence(folder: Path) -> dict[str, Any]:
    """Read the presence file of a running server or site."""
    try:
        presence_record = dict(json.loads(presence_file(folder).read_text()))
        os.kill(int(presence_record["pid"]), 0)
    except (OSError, ValueError, KeyError):
        raise FedLDError(f"nothing of fedld is running for '{folder}'") from None
    return presence_record


def server_status(runs: Path) -> Iterator[str]:
    """Describe a running server in lines: since when, its sites, its runs."""
    control = Control(runs)
    running = control.facts
    yield f"server at {running['address']} since {running['since']}, process {running['pid']}"
    newest = max(runs.glob("*/sites.json"), key=lambda path: path.stat().st_mtime, default=None)
    described = (
        {} if newest is None else {site["site"]: site for site in json.loads(newest.read_text())["sites"]}
    )
    registrations = Registrations(registrations_file(runs))
    nodes = {
        (registrations.name(node.public_key) or f"node {node.node_id}"): node for node in control.nodes()
    }
    for name in sorted({*registrations.keys(), *nodes}):
        yield f"  {name}: {_node(nodes.get(name), described.get(name))}"
    for path in sorted(runs.glob("*/config.toml"), key=lambda path: path.stat().st_mtime):
        done = (path.parent / "summary.json").exists()
        count = len(read_records(path.parent, ROUNDS).lines)
        yield f"  run {path.parent.name}: {count} rounds recorded{', finished' if done else ''}"
    control.close()


def _node(node: Any, described: dict[str, Any] | None) -> str:
    """Describe a site as the server sees it, and as far as it disclosed itself in the newest run."""
    if node is None or not node.last_activated_at:
        return "registered, was never here"
    words = [f"{node.status} since {node.last_activated_at[:19]}"]
    if node.status == "online":
        seen = datetime.fromtimestamp(node.online_until - HEARTBEAT_PATIENCE * node.heartbeat_interval, UTC)
        words.append(f"last seen {seen:%Y-%m-%dT%H:%M:%S}")
    else:
        words = [f"{node.status} since {node.last_deactivated_at[:19]}"]
    if described is not None:
        words.append(f"fedld {described['version']}, {described['train']} training images")
    return ", ".join(words)


def site_status(folder: Path) -> Iterator[str]:
    """Describe a running site in lines: since when, which server, its newest entries in the ledger."""
    running = presence(folder)
    where = f"site '{folder.name}' of server {running['server']}"
    yield f"{where}, process {running['pid']}, since {running['since']}"
    ledger = Ledger(folder / "ledger.jsonl")
    if ledger.file.exists():
        check = ledger.check()
        yield f"  ledger: {check.problem or f'{len(check.entries)} lines, whole'}"
        yield from (f"  {line}" for line in entry_lines(check.entries[-3:]))
    if (folder / SPENT).exists():
        yield f"  {spent_line(folder)}"


def stop(folder: Path, seconds: float = 30.0) -> None:
    """End the server or site of a folder, and wait until it has ended."""
    pid = int(presence(folder)["pid"])
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while presence_file(folder).exists():
        if time.monotonic() > end:
            raise FedLDError(f"process {pid} did not end within {seconds:.0f} s")
        time.sleep(0.1)


class Control:
    """A running server, as its operator sees it."""

    def __init__(self, runs: Path) -> None:
        try:
            running = presence(runs)
        except FedLDError:
            raise FedLDError(
                f"no server keeps its runs in '{runs}': start it with `fedld server start --runs {runs}`, "
                "or name its folder with --server"
            ) from None
        self.facts = running
        version = RuntimeVersionHttpInterceptor(component_name="flwr")
        self._client = connect(ControlHttpClient, Path(str(running["socket"])), [version])

    def start(self, config: dict[str, Any]) -> int:
        """Start a run of fedld's app; its number."""
        with as_file(files("fedld.deployment") / "app") as app:
            content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(config))
        try:
            return int(self._client.StartRun(request).run_id)
        except httpx.HTTPError as error:
            raise FedLDError(f"the server did not take the run: {_said(error)}") from None

    def follow(self, run: int) -> Iterator[str]:
        """Yield the lines of a run's log until the run or the server ends."""
        rest = ""
        try:
            for part in self._client.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
                *lines, rest = (rest + part.log_output).split("\n")
                yield from lines
        except (httpx.HTTPError, ValueError):
            return
        yield rest

    def stop(self, run: int) -> None:
        """End a run; its last finished round is safe."""
        try:
            self._client.StopRun(StopRunRequest(run_id=run))
        except httpx.HTTPError as error:
            raise FedLDError(f"the run could not be stopped: {_said(error)}") from None

    def nodes(self) -> list[Any]:
        """List the sites as Flower records them."""
        try:
            return list(self._client.ListNodes(ListNodesRequest()).nodes_info)
        except httpx.HTTPError as error:
            raise FedLDError(f"the server does not answer: {_said(error)}") from None

    def runs(self) -> list[Any]:
        """List the runs as Flower records them."""
        try:
            return list(self._client.ListRuns(ListRunsRequest()).run_dict.values())
        except httpx.HTTPError as error:
            raise FedLDError(f"the server does not answer: {_said(error)}") from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _said(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError) and (
        flower_error := FlowerError.from_json(error.response.text)
    ):
        return str(flower_error.message)
    return str(error) or type(error).__name__


Progress = Callable[[Event], None]


def flower_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Complete settings for sites: a round goes on without a missing site if a majority is there.

    Updates of ten times the usual length are refused, so that one site cannot spoil the global model.

    >>> flower_defaults({"clients": 3})
    {'on_client_failure': 'skip', 'min_clients': 2, 'max_update_ratio': 10.0, 'clients': 3}
    """
    clients = settings.get("clients", Experiment.model_fields["clients"].default)
    drawn = settings.get("sample_clients") or max(1, round(settings.get("sample_rate", 1.0) * clients))
    quorum = min(drawn, max(2, drawn // 2 + 1))
    kind, colon, path = settings.get("dataset", "").partition(":")
    if colon:  # the server looks from where it was started
        settings = settings | {"dataset": f"{kind}:{Path(path).expanduser().absolute()}"}
    bounds = {} if settings.get("secure") else {"max_update_ratio": 10.0}  # the server sees sums only
    return {"on_client_failure": "skip", "min_clients": quorum, **bounds, **settings}


def submit(
    server: Path,
    out: Path,
    experiment: Experiment | None,
    progress: Progress,
    changes: Mapping[str, float] | None = None,
) -> Summary:
    """Run an experiment (None: resume the one in `out`) on a server; returns the summary.

    `server` is the folder of the server's runs, in which `out` lies. `changes` are settings that a resumed
    run may be given anew: `rounds` and `wait_for_clients`.
    """
    config: dict[str, Any] = {"out": str(out.absolute()), "resume": experiment is None}
    if experiment is not None:
        config["experiment"] = experiment.to_toml()
    config |= changes or {}
    control = Control(server)
    try:
        return _follow(control, control.start(config), server, out, progress=progress)
    finally:
        control.close()


def _follow(control: Control, run: int, server: Path, out: Path, progress: Progress) -> Summary:
    """Pass the run's events on until its last one."""
    hint = f"continue with: {again(server, out)}"
    try:
        for line in control.follow(run):
            event = _event(line)
            if event.get("event") == "end":
                return cast(Summary, event)
            if event.get("event") == "error":
                complete = not event["resumable"] or "continue with: " in event["error"]
                raise FedLDError(event["error"] if complete else f"{event['error']}; {hint}")
            if event:
                progress(event)
    except KeyboardInterrupt:
        control.stop(run)
        raise Interrupted(f"stopped; {hint}") from None
    raise FedLDError(f"the server ended the run without a result; {hint}")


def _event(line: str) -> Event:
    """Parse the event in a line of the run's log; empty if the line has none."""
    if not line.startswith('{"event"'):
        return {}
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}
