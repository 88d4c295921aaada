"""`fedld tune`: search a method's numbers on validation images."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.compare import parse_seeds
from fedld.cli.progress import console
from fedld.cli.settings import with_settings
from fedld.engine.records import dump
from fedld.errors import FedLDError


@with_settings()
def tune(
    settings: dict[str, Any],
    minutes: Annotated[
        float, typer.Option(min=0, help="time to spend; the trial under way is finished")
    ] = 10,
    trials: Annotated[int | None, typer.Option(min=1, help="stop after so many trials")] = None,
    seeds: Annotated[str, typer.Option(help="seeds of every trial, separated by commas")] = "0",
    fraction: Annotated[float, typer.Option(help="share of the training images held out")] = 0.2,
    only: Annotated[str | None, typer.Option(help="some of lr, lam, components, mu; default: all")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="try these values and no others: lr=0.01,0.03,0.1; repeatable")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the search in --out")] = False,
    out: Annotated[Path, typer.Option(help="folder of tuned.toml and tune.json")] = Path("runs/tune"),
    json: Annotated[bool, typer.Option("--json", help="print all trials as JSON")] = False,
) -> None:
    """Search learning rate, lambda, components and mu on held-out training images, never on the test set."""
    from fedld.study.tune import Trial
    from fedld.study.tune import tune as search

    def show(trial: Trial) -> None:
        found = ", ".join(f"{name} {value:.4g}" for name, value in trial.values.items()) or "as given"
        score = trial.error if trial.accuracy is None else f"{trial.accuracy:.4f}"
        console.print(f"trial {trial.number}: {found}: {score} ({trial.seconds:.0f} s)", highlight=False)

    tuned = search(
        {"method": "fedavg"} | settings,
        out,
        minutes=minutes,
        trials=trials,
        seeds=parse_seeds(seeds),
        fraction=fraction,
        only=None if only is None else [name.strip() for name in only.split(",")],
        grid=dict(parse_grid(part) for part in grid) if grid else None,
        resume=resume,
        command=shlex.join(["fedld", *sys.argv[1:]]),
        progress=show,
    )
    if json:
        typer.echo(dump(tuned.to_json()))
    else:
        typer.echo(f"best of {len(tuned.trials)} trials: {tuned.best.accuracy:.4f} on validation images")
        typer.echo(f"use it: fedld run --config {out / 'tuned.toml'}")


def parse_grid(part: str) -> tuple[str, tuple[float, ...]]:
    """Name and values of one part of a grid.

    >>> parse_grid("lr=0.01,0.1")
    ('lr', (0.01, 0.1))
    """
    name, _, values = part.partition("=")
    try:
        return name.strip(), tuple(float(value) for value in values.split(","))
    except ValueError:
        raise FedLDError(f"--grid wants NAME=NUMBER,NUMBER, not '{part}'") from None
