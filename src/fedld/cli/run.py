"""`fedld run`: one experiment."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedld.cli.settings import with_settings
from fedld.config.experiment import Experiment, make_experiment, read_toml
from fedld.errors import FedLDError, unknown_name
from fedld.records.schema import ParticipationRecord, Summary
from fedld.records.writer import dump

if TYPE_CHECKING:
    from fedld.study.progress import RunBars

MISSING = 3
"""Exit code: the run is done, but more clients missed rounds than were allowed to."""
RESUME = "continue this run; --rounds and --wait-for-clients may be given anew"
CHANGEABLE = ("rounds", "wait_for_clients")
"""Settings that a resumed run may be given anew."""
ENGINES = ["local", "flower", "flower-simulation"]


@with_settings()
def run(
    settings: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="new run directory; default: runs/<time>")] = None,
    resume: Annotated[Path | None, typer.Option(help=RESUME)] = None,
    engine: Annotated[str, typer.Option(help="local, flower or flower-simulation")] = "local",
    server: Annotated[Path, typer.Option(help="--runs of `fedld server start`, for Flower")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
    require_all: Annotated[bool, typer.Option(help="exit with code 3 if anybody missed a round")] = False,
    max_missing: Annotated[int | None, typer.Option(help="exit with code 3 if more clients did")] = None,
) -> None:
    """Train one method on one federation."""
    from fedld.engine import loop
    from fedld.study.progress import RunBars, console

    changes = {name: settings.pop(name) for name in CHANGEABLE if resume is not None and name in settings}
    if resume is not None:
        path, saved = resume, read_toml(resume / "config.toml")
        own_values = _own_again(settings, saved)
        if out:
            raise FedLDError("--resume continues a run where it is: give no --out")
        experiment = make_experiment(saved | changes, own_values)
    else:
        experiment = make_experiment(settings if engine == "local" else _flower(settings))
        path = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{experiment.method['name']}"
    with RunBars(experiment.rounds, experiment.method["name"]) as bars:
        if engine != "local":
            summary = _submit(
                engine, server, path, experiment, bars=bars, resumed=resume is not None, changes=changes
            )
        elif resume is not None:
            summary = loop.resume(path, progress=bars, warn=console.print, own=own_values, **changes)
        else:
            summary = loop.run(experiment, path, progress=bars)
    if json:
        typer.echo(dump(summary | {"path": str(path)}))
    else:
        _print(summary, path)
    absent = [name for name, record in summary["participation"].items() if record["missing"]]
    for name in absent:
        console.print(f"[bold red]{absence(name, summary['participation'][name])}[/bold red]")
    allowed = 0 if require_all else max_missing
    if allowed is not None and len(absent) > allowed:
        console.print(f"{len(absent)} clients missed rounds, {allowed} may")
        raise typer.Exit(MISSING)


def absence(name: str, record: ParticipationRecord) -> str:
    """Describe a client's absence in a sentence.

    >>> absence("beta", {"drawn": 10, "took_part": 3, "missing": {"away": 7}, "gone_since": 4})
    "'beta' was missing in 7 of 10 rounds, from round 4 to the end (away: 7)"
    """
    end = f", from round {record['gone_since']} to the end" if record["gone_since"] else ""
    why = ", ".join(f"{reason}: {count}" for reason, count in record["missing"].items())
    missing = record["drawn"] - record["took_part"]
    return f"'{name}' was missing in {missing} of {record['drawn']} rounds{end} ({why})"


def _own_again(settings: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Collect the user's own parts for a run that is resumed: no other settings may be given again."""
    from fedld.config.own import name_values

    named, own_values = name_values(settings)
    for key, value in named.items():
        if key not in own_values or saved.get(key) != value:
            raise FedLDError(
                "--resume continues a run with its own settings: give no others but the import paths of its "
                f"own parts, as they were ('{key}' is {saved.get(key)!r} there)"
            )
    return own_values


def _flower(settings: dict[str, Any]) -> dict[str, Any]:
    from fedld.deployment.control import flower_defaults

    return flower_defaults(settings)


def _submit(
    engine: str,
    server: Path,
    path: Path,
    experiment: Experiment,
    bars: "RunBars",
    resumed: bool,
    changes: dict[str, Any],
) -> Summary:
    """Hand the run to Flower and show what it reports."""
    if engine == "flower-simulation":
        from fedld.engine.backends.flower.simulation import simulate

        return simulate(experiment, path, bars, resume=resumed)
    from fedld.deployment.control import submit

    if engine != "flower":
        raise unknown_name("engine", engine, ENGINES)
    return submit(server, path, None if resumed else experiment, bars, changes=changes)


def _print(summary: Summary, path: Path) -> None:
    from fedld.records.tables import headline

    typer.echo(
        f"{summary['method']} on {summary['dataset']}, seed {summary['seed']}: "
        f"{headline(summary)} after {summary['rounds']} rounds in {summary['seconds']:.1f} s"
    )
    if "validated" in summary:
        typer.echo(f"best by the validation images: round {summary['validated']['round']} (best.safetensors)")
    typer.echo(f"records: {path}")
