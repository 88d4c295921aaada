"""`fedld run --engine flower`: hand an experiment to a SuperLink and follow the run."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import tomli_w

from fedld.engine.experiment import Experiment
from fedld.engine.flower import QUIET
from fedld.engine.loop import Interrupted
from fedld.engine.records import Line
from fedld.errors import FedLDError

STARTED = "Successfully started run "
Progress = Callable[[Line], None]


def flower_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for sites: a missing one is left out of a round, but a majority must be there.

    >>> flower_defaults({"clients": 3})
    {'on_client_failure': 'skip', 'min_clients': 2, 'clients': 3}
    """
    clients = settings.get("clients", Experiment.model_fields["clients"].default)
    drawn = settings.get("sample_clients") or max(1, round(settings.get("sample_rate", 1.0) * clients))
    quorum = min(drawn, max(2, drawn // 2 + 1))
    kind, colon, path = settings.get("dataset", "").partition(":")
    if colon:  # the server looks from where it was started
        settings = settings | {"dataset": f"{kind}:{Path(path).expanduser().absolute()}"}
    return {"on_client_failure": "skip", "min_clients": quorum, **settings}


def program(name: str) -> str:
    """A program of this Python's environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise FedLDError(f"'{name}' is not installed: pip install 'fedld[flower]'")
    return str(path)


def submit(superlink: str, out: Path, experiment: Experiment | None, progress: Progress) -> Line:
    """Run an experiment (None: resume the one in `out`) on a SuperLink; returns the summary.

    `superlink` is a name in Flower's own configuration, `out` a directory on the SuperLink's machine.
    """
    config = {"out": str(out.absolute()), "resume": experiment is None}
    if experiment is not None:
        config["experiment"] = experiment.to_toml()
    with tempfile.TemporaryDirectory() as folder, as_file(files("fedld.engine.flower") / "app") as app:
        overrides = Path(folder) / "run.toml"
        overrides.write_text(tomli_w.dumps(config))
        command = [program("flwr"), "run", str(app), superlink, "--stream", "--run-config", str(overrides)]
        return _follow(command, superlink, out, progress)


def _follow(command: list[str], superlink: str, out: Path, progress: Progress) -> Line:
    """Pass the run's events on until its last one."""
    run, said = "", ""
    environment = os.environ | QUIET | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = _event(line)
                if event.get("event") == "end":
                    return event
                if event.get("event") == "error":
                    hint = f"; {_hint(superlink, out)}" if event["resumable"] else ""
                    raise FedLDError(f"{event['error']}{hint}")
                if event:
                    progress(event)
                elif line.startswith(STARTED):
                    run = line.removeprefix(STARTED).strip()
                elif not run and "│" in line:
                    said += line.strip(" │\n") + " "
        except KeyboardInterrupt:
            subprocess.run([program("flwr"), "stop", run, superlink], env=environment, check=False)
            raise Interrupted(f"stopped; {_hint(superlink, out)}") from None
        finally:
            process.terminate()
    if run:
        raise FedLDError(f"SuperLink '{superlink}' ended the run without a result; {_hint(superlink, out)}")
    raise FedLDError(f"SuperLink '{superlink}' did not take the run: {said.strip()}")


def _hint(superlink: str, out: Path) -> str:
    return f"continue with: fedld run --engine flower --superlink {superlink} --resume {out}"


def _event(line: str) -> Line:
    """The event that a line of the run's log tells, if it tells one."""
    if not line.startswith('{"event"'):
        return {}
    try:
        return dict(json.loads(line))
    except ValueError:
        return {}
