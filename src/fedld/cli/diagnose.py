"""`fedld diagnose`: where a federation loses, in plain words with the numbers behind them."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from fedld.cli.settings import with_settings
from fedld.data import load
from fedld.engine.experiment import make_experiment
from fedld.engine.records import dump
from fedld.errors import FedLDError
from fedld.study.diagnose import diagnose_federation, diagnose_run


@with_settings()
def diagnose(
    settings: dict[str, Any],
    run: Annotated[Path | None, typer.Argument(help="run directory; without: the data asked for")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the partition")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of diagnosis.md and .json; default: RUN")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the diagnosis as JSON")] = False,
) -> None:
    """Say where heterogeneity hurts: in a run's records, or in a dataset and partition before training."""
    if run is not None and (settings or seed is not None):
        raise FedLDError("a run is diagnosed by its own records: give no other settings")
    if seed is not None:
        settings["seed"] = seed
    diagnosis = diagnose_run(run) if run else diagnose_federation(load(make_experiment(settings).data_spec()))
    if folder := out or run:
        diagnosis.write(folder)
    if json:
        typer.echo(dump(diagnosis.to_json()))
    else:
        Console().print(Markdown(diagnosis.to_markdown()))
