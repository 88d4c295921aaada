"""`fedld reproduce`: the paper's figures and tables on any data."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedld.cli.compare import FAILED_RUNS, SEEDS, Primary, parse_seeds
from fedld.cli.settings import with_settings
from fedld.records.writer import dump

reproduce = typer.Typer(help="The paper's figures and tables.", no_args_is_help=True)

Seeds = Annotated[str, typer.Option(help=SEEDS)]
Resume = Annotated[bool, typer.Option("--resume", help="finish what is there already")]
Jobs = Annotated[int | None, typer.Option(help="runs at the same time; default: cores")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@reproduce.command()
@with_settings("method", "rounds", "alpha", "partition", "workers", "decompose", "seed")
def figure2(
    settings: dict[str, Any],
    seeds: Seeds = "0,1,2",
    warm_rounds: Annotated[int, typer.Option(min=0, help="rounds of FedAvg on iid clients before")] = 0,
    warm_lr: Annotated[float | None, typer.Option(help="their learning rate; default: lr")] = None,
    out: Annotated[Path, typer.Option(help="study directory")] = Path("runs/figure2"),
    resume: Resume = False,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Shift and aggregation loss of one round against heterogeneity, with and without FedLD's two parts."""
    from fedld.study.paper.figure2 import plan, run_figure2
    from fedld.study.progress import RunBars

    planned = plan(
        settings,
        parse_seeds(seeds),
        out,
        command=_command(),
        warm_rounds=warm_rounds,
        warm_lr=warm_lr,
    )
    with RunBars(planned.rounds, f"{len(planned.study.cells)} runs") as bars:
        result = run_figure2(planned, out, resume=resume, jobs=jobs, progress=bars)
    typer.echo(dump(result.to_json()) if json else result.to_markdown() + f"\nfigure: {out / 'figure2.png'}")


Scale = Annotated[Literal["small", "paper"], typer.Option(help="small: two cores; paper: ResNet-50, 384 px")]
Splits = Annotated[str | None, typer.Option(help="some of the splits; default: what the data can show")]
Out = Annotated[Path | None, typer.Option(help="study directory; default: runs/<table>")]


def _table_command(table: str, text: str, rows: str) -> None:
    """Register `fedld reproduce <table>`."""

    @reproduce.command(name=table, help=text)
    @with_settings("method", "objective", "rule", "workers", "split", "seed", many=True)
    def command(
        settings: dict[str, Any],
        scale: Scale = "small",
        seeds: Seeds = "0,1,2",
        methods: Annotated[
            str | None, typer.Option(help=f"rows, separated by commas; default: {rows}")
        ] = None,
        splits: Splits = None,
        out: Out = None,
        resume: Resume = False,
        jobs: Jobs = None,
        primary: Primary = None,
        json: Json = False,
    ) -> None:
        from fedld.study.paper.tables import plan, run_plan
        from fedld.study.progress import RunBars

        planned = plan(
            table,
            settings,
            parse_seeds(seeds),
            scale=scale,
            arms=_names(methods),
            splits=_names(splits),
            command=_command(),
            primary=primary,
        )
        where = out or Path("runs") / table
        with RunBars(planned.rounds, f"{planned.runs} runs") as bars:
            result = run_plan(planned, where, resume=resume, jobs=jobs, progress=bars)
        typer.echo(
            dump(result.to_json()) if json else f"{result.to_markdown()}\nreport: {where / 'report.html'}"
        )
        if any(column.comparison.failed for column in result.columns):
            raise typer.Exit(FAILED_RUNS)


_table_command("table1", "Methods on the Retina splits and COVID-FL.", "all of Table 1 and ours")
_table_command("table2", "FedLD's two parts, one by one.", "none,principal,margin,both")
_table_command("table3", "Fifty clients, a tenth of them per round.", "all of Table 3 and ours")


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _command() -> str:
    return shlex.join(["fedld", *sys.argv[1:]])
