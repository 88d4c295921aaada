"""`fedld data`: look at a federation before training on it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedld.cli.settings import with_settings
from fedld.data import describe, load
from fedld.engine.experiment import make_experiment
from fedld.engine.records import dump


@with_settings()
def data(
    settings: dict[str, Any],
    seed: Annotated[int | None, typer.Option(help="seed of the partition")] = None,
    png: Annotated[Path | None, typer.Option(help="write a picture of the federation")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the facts as JSON")] = False,
) -> None:
    """Show how the images are dealt to the clients."""
    from fedld.study.pictures import partition_png, partition_text

    if seed is not None:
        settings["seed"] = seed
    federation = load(make_experiment(settings).data_spec())
    if png is not None:
        partition_png(federation, png)
    if json:
        typer.echo(dump(describe(federation)))
    else:
        Console().print(partition_text(federation))
