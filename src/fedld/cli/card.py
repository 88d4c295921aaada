"""`fedld card`: the model card of a run."""

from pathlib import Path
from typing import Annotated

import typer


def card(
    run: Annotated[Path, typer.Argument(help="run or study directory")],
    method: Annotated[str | None, typer.Option(help="of a study: the method that the card describes")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of card.md and card.json; default: RUN")] = None,
    positive: Annotated[
        str | None, typer.Option(help="class of which sensitivity is given; default: the last one")
    ] = None,
    specificity: Annotated[
        float | None, typer.Option(help="at which sensitivity is given; default: the run's", min=0.01, max=1)
    ] = None,
    use: Annotated[str | None, typer.Option(help="what the model is intended for")] = None,
    owner: Annotated[str | None, typer.Option(help="who answers for the model")] = None,
    licence: Annotated[str | None, typer.Option(help="under which the model may be used")] = None,
) -> None:
    """Write a model card: data, method, results with intervals by site, who took part, limitations."""
    from fedld.study.card import make_card, make_study_card

    folder = out or run
    statements = {"use": use, "owner": owner, "licence": licence}
    if (run / "study.json").exists():
        make_study_card(run, method, statements).write(folder)
    else:
        make_card(run, positive, specificity, statements).write(folder)
    typer.echo(f"{folder / 'card.md'} and {folder / 'card.json'}")
