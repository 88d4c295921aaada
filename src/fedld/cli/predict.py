"""`fedld predict`: what a trained model says of pictures, as CSV."""

from pathlib import Path
from typing import Annotated

import typer


def predict(
    model: Annotated[Path, typer.Argument(help="run, its model.safetensors, or study (mean over seeds)")],
    images: Annotated[Path, typer.Argument(help="picture, folder of pictures, or npz file")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: the terminal")] = None,
    bits: Annotated[int | None, typer.Option(help="bits that 16-bit files really use", min=8, max=16)] = None,
    method: Annotated[str | None, typer.Option(help="of a study: which method's models")] = None,
) -> None:
    """Give the probability of every class for every picture, as CSV."""
    import numpy as np

    from fedld.data.pictures import read_pictures
    from fedld.engine.ensemble import load_predictor
    from fedld.records.table import predictions_table
    from fedld.records.writer import write_atomically

    saved = load_predictor(model, method)
    for note in saved.notes:
        typer.echo(f"note: {note}", err=True)
    channels, height, width = saved.facts.input_shape
    names: list[str] = []
    told = []
    for some, pixels in read_pictures(images, (channels, height, width), bits):
        names += some
        told.append(saved.probabilities(pixels))
    text = predictions_table(saved.facts.classes, np.concatenate(told), {"name": names})
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"{len(names)} predictions in {out}", err=True)
