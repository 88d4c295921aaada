"""`fedld run`: one experiment."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.progress import RunBars, console
from fedld.cli.settings import with_settings
from fedld.engine import loop
from fedld.engine.experiment import Experiment, make_experiment, read_toml
from fedld.engine.records import Line, dump
from fedld.errors import FedLDError, nearest

ENGINES = ["local", "flower", "flower-simulation"]


@with_settings()
def run(
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="new run directory; default: runs/<time>")] = None,
    resume: Annotated[Path | None, typer.Option(help="continue the run in this directory")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of data, initial weights and order")] = None,
    engine: Annotated[str, typer.Option(help="local, flower or flower-simulation")] = "local",
    superlink: Annotated[str, typer.Option(help="name of a SuperLink in Flower's configuration")] = "",
    json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Train one method on one federation."""
    if seed is not None:
        settings["seed"] = seed
    if resume is not None:
        if settings or out:
            raise FedLDError("--resume continues a run with its own settings: give no others")
        path = resume
        experiment = make_experiment(read_toml(resume / "config.toml"))
    else:
        experiment = make_experiment(settings if engine == "local" else _flower(settings))
        path = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{experiment.method['name']}"
    with RunBars(experiment.rounds, experiment.method["name"]) as bars:
        if engine != "local":
            summary = _submit(engine, superlink, path, experiment, bars, resume is not None)
        elif resume is not None:
            summary = loop.resume(path, progress=bars, warn=console.print)
        else:
            summary = loop.run(experiment, path, progress=bars)
    if json:
        typer.echo(dump(summary | {"path": str(path)}))
    else:
        _print(summary, path)


def _flower(settings: dict[str, Any]) -> dict[str, Any]:
    from fedld.engine.flower.submit import flower_defaults

    return flower_defaults(settings)


def _submit(
    engine: str, superlink: str, path: Path, experiment: Experiment, bars: RunBars, resumed: bool
) -> Line:
    """Hand the run to Flower and show what it reports."""
    if engine == "flower-simulation":
        from fedld.engine.flower.simulation import simulate

        return simulate(experiment, path, bars, resume=resumed)
    from fedld.engine.flower.submit import submit

    if engine != "flower":
        raise FedLDError(f"unknown engine '{engine}': {nearest(engine, ENGINES)}")
    if not superlink:
        raise FedLDError("--engine flower needs --superlink NAME")
    return submit(superlink, path, None if resumed else experiment, bars)


def _print(summary: Line, path: Path) -> None:
    accuracy = summary.get("final_accuracy", summary.get("personal_final_accuracy"))
    typer.echo(
        f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}: "
        f"accuracy {accuracy:.4f} after {summary['rounds']} rounds in {summary['seconds']:.1f} s"
    )
    typer.echo(f"records: {path}")
