"""`fedld data`: look at a federation before training on it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.settings import with_settings
from fedld.config.experiment import make_experiment
from fedld.records.writer import dump


@with_settings()
def data(
    settings: dict[str, Any],
    png: Annotated[Path | None, typer.Option(help="write a picture of the federation")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the facts as JSON")] = False,
) -> None:
    """Show how the images are dealt to the clients."""
    from rich.console import Console

    from fedld.config.resolve import make_federation
    from fedld.data import describe
    from fedld.study.pictures import partition_png, partition_text

    federation = make_federation(make_experiment(settings))
    if png is not None:
        partition_png(federation, png)
    if json:
        typer.echo(dump(describe(federation)))
    else:
        console = Console()
        console.print(partition_text(federation, colour=console.color_system is not None))
