"""`fedld tune`: search a method's numbers on validation images."""

import shlex
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedld.cli.compare import Primary, parse_seeds
from fedld.cli.settings import with_settings
from fedld.config.experiment import plain_value
from fedld.errors import FedLDError
from fedld.records.writer import dump

if TYPE_CHECKING:
    from fedld.study.tune import SearchRange, Value


@with_settings("seed")
def tune(
    settings: dict[str, Any],
    minutes: Annotated[
        float, typer.Option(min=0, help="time to spend; the trial under way is finished")
    ] = 10,
    trials: Annotated[int | None, typer.Option(min=1, help="stop after so many trials")] = None,
    seeds: Annotated[str, typer.Option(help="seeds of every trial, separated by commas")] = "0",
    primary: Primary = None,
    only: Annotated[str | None, typer.Option(help="some of lr, lam, components, mu; default: all")] = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="try these values of any setting: lr=0.01,0.1; repeatable")
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", help="search any setting between two: momentum=0.1..0.9; repeatable"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the search in --out")] = False,
    out: Annotated[Path, typer.Option(help="folder of tuned.toml and tune.json")] = Path("runs/tune"),
    json: Annotated[bool, typer.Option("--json", help="print all trials as JSON")] = False,
) -> None:
    """Search a method's numbers, or any settings, on held-out training images, never on the test set."""
    from fedld.study.progress import console
    from fedld.study.tune import TuningTrial, value_text
    from fedld.study.tune import tune as search

    def show(trial: TuningTrial) -> None:
        choice = (
            ", ".join(f"{name} {value_text(value)}" for name, value in trial.values.items()) or "as given"
        )
        score = trial.error if trial.score is None else f"{trial.score:.4f}"
        console.print(f"trial {trial.number}: {choice}: {score} ({trial.seconds:.0f} s)", highlight=False)

    if sum(option is not None for option in (only, grid, ranges)) > 1:
        raise FedLDError("--only, --grid and --range exclude each other: each says all that is searched")
    tuned = search(
        {"method": "fedavg"} | settings,
        out,
        minutes=minutes,
        trials=trials,
        seeds=parse_seeds(seeds),
        primary=primary,
        only=None if only is None else [name.strip() for name in only.split(",")],
        grid=dict(parse_grid(part) for part in grid) if grid else None,
        ranges=dict(parse_range(part) for part in ranges) if ranges else None,
        resume=resume,
        command=shlex.join(["fedld", *sys.argv[1:]]),
        progress=show,
    )
    if json:
        typer.echo(dump(tuned.to_json()))
    else:
        score = f"{tuned.primary} {tuned.best.score:.4f}"
        typer.echo(f"best of {len(tuned.trials)} trials: {score} on validation images")
        typer.echo(f"use it: fedld run --config {out / 'tuned.toml'}")


def parse_grid(part: str) -> tuple[str, tuple["Value", ...]]:
    """Name and values of one part of a grid.

    >>> parse_grid("lr=0.01,0.1"), parse_grid("model=cnn,resnet8")
    (('lr', (0.01, 0.1)), ('model', ('cnn', 'resnet8')))
    """
    name, equals, text = part.partition("=")
    values = tuple(plain_value(item.strip()) for item in text.split(",") if item.strip())
    if not equals or not values or not all(isinstance(item, float | int | str) for item in values):
        raise FedLDError(f"--grid wants NAME=VALUE,VALUE, not '{part}'")
    return name.strip(), values


def parse_range(part: str) -> tuple[str, "SearchRange"]:
    """Name and ends of a range.

    >>> parse_range("momentum=0.1..0.9")[1].high, parse_range("batch_size=8..64")[1].log
    (0.9, False)
    """
    from fedld.study.tune import SearchRange

    name, _, text = part.partition("=")
    ends = [plain_value(end) for end in text.split("..")]
    if len(ends) != 2 or not all(isinstance(end, float | int) and isfinite(end) for end in ends):
        raise FedLDError(f"--range wants NAME=NUMBER..NUMBER, not '{part}'")
    return name.strip(), SearchRange(*ends)
