"""`fedld auto`: which method to use, found and trained within given minutes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedld.cli.compare import Primary
from fedld.cli.settings import with_settings
from fedld.errors import Interrupted
from fedld.records.writer import dump


@with_settings("method", "seed", "eval_every")
def auto(
    settings: dict[str, Any],
    minutes: Annotated[float, typer.Option(min=0, help="time to spend")] = 10,
    primary: Primary = None,
    jobs: Annotated[int | None, typer.Option(help="runs at the same time; default: cores")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the search in --out")] = False,
    out: Annotated[Path, typer.Option(help="folder of auto.json and of the model")] = Path("runs/auto"),
    json: Annotated[bool, typer.Option("--json", help="print all that was tried as JSON")] = False,
) -> None:
    """Find the method to use on held-out training images, and train it; the test set is read at the end."""
    from fedld.study.auto import auto as search

    try:
        result = search(settings, out, minutes=minutes, primary=primary, jobs=jobs, resume=resume)
    except Interrupted:
        raise Interrupted(f"stopped; what is finished is kept; continue with --resume --out {out}") from None
    if json:
        typer.echo(dump(result.to_json()))
        return
    typer.echo(result.to_markdown())
    value = result.measures.get(result.primary)
    typer.echo(
        f"{result.chosen} on the test set: {result.primary} {'unknown' if value is None else f'{value:.4f}'}"
    )
    typer.echo(f"model: {result.path / 'model.safetensors'}")
