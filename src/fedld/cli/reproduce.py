"""`fedld reproduce`: the paper's figures and tables on any data."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.compare import parse_seeds
from fedld.cli.progress import RunBars
from fedld.cli.settings import with_settings
from fedld.engine.records import dump

reproduce = typer.Typer(help="The paper's figures and tables.", no_args_is_help=True)

Seeds = Annotated[str, typer.Option(help="seeds, separated by commas")]
Resume = Annotated[bool, typer.Option("--resume", help="finish what is there already")]
Jobs = Annotated[int | None, typer.Option(help="runs at the same time; default: cores")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@reproduce.command()
@with_settings("method", "rounds", "alpha", "partition", "workers", "decompose")
def figure2(
    settings: dict[str, Any],
    seeds: Seeds = "0,1,2",
    warm_rounds: Annotated[int, typer.Option(min=0, help="rounds of FedAvg on iid clients before")] = 0,
    out: Annotated[Path, typer.Option(help="study directory")] = Path("runs/figure2"),
    resume: Resume = False,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Shift and aggregation loss of one round against heterogeneity, with and without FedLD's two parts."""
    from fedld.study.figure2 import plan, run_figure2

    planned = plan(settings, parse_seeds(seeds), out, command=_command(), warm_rounds=warm_rounds)
    with RunBars(planned.rounds, f"{len(planned.study.cells)} runs") as bars:
        result = run_figure2(planned, out, resume=resume, jobs=jobs, progress=bars)
    typer.echo(dump(result.to_json()) if json else result.to_markdown() + f"\nfigure: {out / 'figure2.png'}")


def _command() -> str:
    return shlex.join(["fedld", *sys.argv[1:]])
