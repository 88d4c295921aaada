"""`fedld compare`: several methods, several seeds, the same partitions and initial weights."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from fedld.cli.progress import RunBars
from fedld.cli.settings import with_settings
from fedld.engine.records import dump
from fedld.errors import FedLDError
from fedld.study.compare import plan, run_study
from fedld.study.table import Row, Table

WIDE = 110  # characters that the whole table needs
NARROW = (0, 1, 2, 6)


@with_settings("method", "workers", many=True)
def compare(
    settings: dict[str, Any],
    methods: Annotated[str, typer.Option(help="names, separated by commas")] = "fedavg,fedprox,fedld",
    seeds: Annotated[str, typer.Option(help="seeds, separated by commas")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="study directory")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="finish what is there already")] = False,
    jobs: Annotated[int | None, typer.Option(help="runs at the same time; default: cores")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
) -> None:
    """Compare methods under equal conditions; writes table.json, table.md and report.html."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    study = plan(settings, names, parse_seeds(seeds), command=shlex.join(["fedld", *sys.argv[1:]]))
    with RunBars(study.rounds, f"{len(study.cells)} runs") as bars:
        table = run_study(study, out, resume=resume, jobs=jobs, progress=bars)
    if json:
        typer.echo(dump(table.to_json()))
    else:
        console = Console()
        console.print(rich_table(table, console.width))
        typer.echo(f"report: {out / 'report.html'}")


def parse_seeds(text: str) -> list[int]:
    """Seeds from `0,1,2`."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise FedLDError(f"seeds must be whole numbers separated by commas, not '{text}'") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise FedLDError(f"seeds must be different and not negative, not '{text}'")
    return seeds


def rich_table(table: Table, width: int) -> RichTable:
    """The comparison for the terminal: columns that hold something, and on a narrow one the main ones."""
    cells = [row.cells() for row in table.rows]
    wanted = range(len(Row.COLUMNS)) if width >= WIDE else NARROW
    used = [k for k in wanted if any(row[k] not in ("", "-") for row in cells)]
    shown = RichTable(title=table.title, box=box.SIMPLE)
    shown.add_column("method", no_wrap=True)
    for k in used:
        shown.add_column(Row.COLUMNS[k], justify="right", no_wrap=k < 2)
    for row, texts in zip(table.rows, cells, strict=True):
        shown.add_row(row.label, *(texts[k] for k in used))
    return shown
