"""`fedld compare`: several methods, several seeds, the same partitions and initial weights."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedld.cli.settings import with_settings
from fedld.errors import FedLDError, Interrupted
from fedld.records.writer import dump

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from fedld.study.comparison import Comparison

FAILED_RUNS = 3
"""Exit code: the study is done, but without runs that failed."""
METHODS = "fedavg,fedprox,fedld,fedld-measured"
NAMES = "names, separated by commas; LABEL=NAME compares a method with itself: --set LABEL.lr=0.1"
WIDE = 160  # characters that the whole table needs
NARROW = 4  # columns that a narrow one shows
Primary = Annotated[
    str | None,
    typer.Option(help="measure that decides: accuracy, balanced_accuracy, auroc, worst_client or a --metric"),
]

Scheduler = Annotated[
    str | None,
    typer.Option(help="run on a Dask cluster: tcp://HOST:PORT or tls://HOST:PORT; --out is a shared folder"),
]

SEEDS = "seeds themselves: 5 is seed 5 alone, five seeds are 0,1,2,3,4; default: 0,1,2, with --folds 0"
TargetText = Annotated[
    str,
    typer.Option(help="give the cost to POINTS below the baseline's final accuracy, or POINTS@ACCURACY"),
]


@with_settings("method", "workers", "seed", "fold", many=True)
def compare(
    settings: dict[str, Any],
    methods: Annotated[str, typer.Option(help=NAMES)] = METHODS,
    seeds: Annotated[str | None, typer.Option(help=SEEDS)] = None,
    study: Annotated[Path | None, typer.Argument(help="with --resume and nothing else: the study")] = None,
    out: Annotated[Path, typer.Option(help="study directory")] = Path("runs/compare"),
    resume: Annotated[bool, typer.Option("--resume", help="finish what is there already")] = False,
    jobs: Annotated[int | None, typer.Option(help="runs at the same time; default: cores")] = None,
    scheduler: Scheduler = None,
    primary: Primary = None,
    target: TargetText = "0.5",
    json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
) -> None:
    """Compare methods under equal conditions; writes the table (json, md, tex, csv) and report.html."""
    from rich.console import Console

    from fedld.study.cluster import connect
    from fedld.study.compare import plan, reopen, run_study
    from fedld.study.progress import RunBars

    if study is not None:
        if not resume or settings:
            raise FedLDError(f"'{study}' is the study to finish: give --resume, and no settings beside it")
        planned, out = reopen(study), study
    else:
        names = _labelled(methods)
        command = shlex.join(["fedld", *sys.argv[1:]])
        usual = "0" if settings.get("folds") else "0,1,2"
        drawn = parse_seeds(usual if seeds is None else seeds)
        planned = plan(settings, names, drawn, command=command, primary=primary, target=target)
    client = connect(scheduler) if scheduler else None
    with RunBars(planned.rounds, f"{len(planned.cells)} runs") as bars:
        try:
            comparison = run_study(planned, out, resume=resume, jobs=jobs, progress=bars, client=client)
        except Interrupted:
            where = f" --scheduler {shlex.quote(scheduler)}" if scheduler else ""
            again = f"continue with: fedld compare --resume {shlex.quote(str(out))}{where}"
            raise Interrupted(f"stopped; what is finished is kept; {again}") from None
    if json:
        typer.echo(dump(comparison.to_json()))
    else:
        console = Console()
        console.print(rich_table(comparison, console.width))
        typer.echo(f"{comparison.verdict}.")
        for line in comparison.warnings:
            typer.echo(f"note: {line}")
        typer.echo(f"report: {out / 'report.html'}")
    if comparison.failed:
        raise typer.Exit(FAILED_RUNS)


def _labelled(text: str) -> list[Any] | dict[str, Any]:
    """Parse methods from `fedavg,fedprox`, or by label from `sgd=fedavg,adamw=fedavg`."""
    from fedld.config.own import import_methods

    words = [word.strip() for word in text.split(",") if word.strip()]
    methods = import_methods([word.rpartition("=")[2] for word in words])
    if not any("=" in word for word in words):
        return methods
    labels = [word.rpartition("=")[0] or word for word in words]
    if len(set(labels)) < len(labels):
        raise FedLDError(f"two methods have one label in '{text}'")
    return dict(zip(labels, methods, strict=True))


def parse_seeds(text: str) -> list[int]:
    """Parse seeds from `0,1,2`."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise FedLDError(f"seeds must be whole numbers separated by commas, not '{text}'") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise FedLDError(f"seeds must be different and not negative, not '{text}'")
    return seeds


def rich_table(comparison: "Comparison", width: int) -> "RichTable":
    """Format the comparison for the terminal: on a narrow one the main columns only."""
    from rich import box
    from rich.table import Table as RichTable

    head, *rows = comparison.table
    used = len(head) if width >= WIDE else NARROW
    table = RichTable(title=comparison.title, box=box.SIMPLE)
    table.add_column(head[0], no_wrap=True)
    for k, name in enumerate(head[1:used]):
        table.add_column(name, justify="right", no_wrap=k < 2)
    for row in rows:
        table.add_row(*row[:used])
    return table
