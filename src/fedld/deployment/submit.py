"""`fedld run --engine flower`: hand an experiment to a server and follow the run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from fedld.config.experiment import Experiment
from fedld.deployment.control import Control
from fedld.engine.backends.flower.engine import again
from fedld.errors import FedLDError, Interrupted
from fedld.records.schema import Event, Summary

Progress = Callable[[Event], None]


def flower_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for sites: a missing one is left out of a round, but a majority must be there.

    Updates of ten times the usual length are refused: one site's poison should not be everybody's.

    >>> flower_defaults({"clients": 3})
    {'on_client_failure': 'skip', 'min_clients': 2, 'max_update_ratio': 10.0, 'clients': 3}
    """
    clients = settings.get("clients", Experiment.model_fields["clients"].default)
    drawn = settings.get("sample_clients") or max(1, round(settings.get("sample_rate", 1.0) * clients))
    quorum = min(drawn, max(2, drawn // 2 + 1))
    kind, colon, path = settings.get("dataset", "").partition(":")
    if colon:  # the server looks from where it was started
        settings = settings | {"dataset": f"{kind}:{Path(path).expanduser().absolute()}"}
    bounds = {} if settings.get("secure") else {"max_update_ratio": 10.0}  # nobody sees single updates there
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
        return _follow(control, control.start(config), server, out, progress)
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
                told = not event["resumable"] or "continue with: " in event["error"]
                raise FedLDError(event["error"] if told else f"{event['error']}; {hint}")
            if event:
                progress(event)
    except KeyboardInterrupt:
        control.stop(run)
        raise Interrupted(f"stopped; {hint}") from None
    raise FedLDError(f"the server ended the run without a result; {hint}")


def _event(line: str) -> Event:
    """The event that a line of the run's log tells, if it tells one."""
    if not line.startswith('{"event"'):
        return {}
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}
