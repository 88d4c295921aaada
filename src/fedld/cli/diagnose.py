"""`fedld diagnose`: where a federation loses, in plain words with the numbers behind them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.settings import with_settings
from fedld.config.experiment import make_experiment
from fedld.errors import FedLDError
from fedld.records.writer import dump


@with_settings()
def diagnose(
    settings: dict[str, Any],
    run: Annotated[Path | None, typer.Argument(help="run or study; without: the data asked for")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of diagnosis.md and .json; default: RUN")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the diagnosis as JSON")] = False,
) -> None:
    """Say where heterogeneity hurts: in a run's records, or in a dataset and partition before training."""
    from rich.console import Console
    from rich.markdown import Markdown

    from fedld.analysis.diagnosis.page import diagnose_federation, diagnose_run
    from fedld.config.resolve import make_federation

    if run is not None and settings:
        raise FedLDError("a run is diagnosed by its own records: give no other settings")
    if run is not None:
        diagnosis = diagnose_run(run)
    else:
        diagnosis = diagnose_federation(make_federation(make_experiment(settings)))
    if folder := out or run:
        diagnosis.write(folder)
    if json:
        typer.echo(dump(diagnosis.to_json()))
    else:
        Console().print(Markdown(diagnosis.to_markdown()))
