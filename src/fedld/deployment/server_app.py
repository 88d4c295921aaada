"""The ServerApp: runs the engine's own round loop over Flower's grid, with what was submitted."""

import os
import tomllib
from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from fedld.config.experiment import make_experiment
from fedld.deployment.registrations import Registrations
from fedld.engine import loop
from fedld.engine.backends.flower.engine import FlowerEngine, report
from fedld.engine.backends.flower.sites import Registered
from fedld.errors import FedLDError
from fedld.records.schema import Summary

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment that was submitted; the last event says how it ended."""
    config = dict(context.run_config)
    out = Path(str(config["out"]))
    try:
        report({"event": "end", **_run(grid, allowed(out), config)})
    except Exception as error:
        text = str(error) if isinstance(error, FedLDError) else f"{type(error).__name__}: {error}"
        report({"event": "error", "error": text, "resumable": (out / "checkpoints").exists()})
        raise


def _run(grid: Grid, out: Path, config: UserConfig) -> Summary:
    engine = FlowerEngine(grid, out, runs=_runs(), registered=_registered())
    if config["resume"]:
        rounds, wait = int(config["rounds"]), float(config["wait_for_clients"])
        return loop.resume(
            out,
            progress=report,
            engine=engine,
            rounds=rounds or None,
            wait_for_clients=None if wait < 0 else wait,
        )
    if (out / "config.toml").exists():
        raise FedLDError(f"'{out}' already holds a run: choose another --out, or continue it with --resume")
    experiment = make_experiment(tomllib.loads(str(config["experiment"])))
    return loop.run(experiment, out, progress=report, engine=engine)


def allowed(out: Path) -> Path:
    """Check that the run directory lies where this server lets runs be written."""
    runs = _runs()
    if runs and not out.resolve().is_relative_to(runs.resolve()):
        raise FedLDError(f"this server keeps its runs in '{runs}', not in '{out}'")
    return out


def _runs() -> Path | None:
    """Read the folder of this server's runs from the environment."""
    folder = os.environ.get("FEDLD_RUNS")
    return Path(folder) if folder else None


def _registered() -> Registered | None:
    """Make a reader of the names of registered keys; None where every key is admitted."""
    file = os.environ.get("FEDLD_REGISTRATIONS")
    return Registrations(Path(file)).name if file else None
