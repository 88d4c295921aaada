"""`fedld predict`: what a trained model says of pictures or of a table's rows, as CSV and masks as PNG."""

from pathlib import Path
from typing import Annotated

import typer


def predict(
    model: Annotated[Path, typer.Argument(help="run, its model.safetensors, or study (mean over seeds)")],
    images: Annotated[Path, typer.Argument(help="pictures: file, folder, npz; table: CSV, parquet")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: the terminal")] = None,
    masks: Annotated[
        Path | None, typer.Option(help="segmentation: new folder of PNG files; default: beside --out")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="bits that 16-bit files really use", min=8, max=16)] = None,
    method: Annotated[str | None, typer.Option(help="of a study: which method's models")] = None,
) -> None:
    """Give probabilities, values, risks or masks for every picture or row of a table: CSV and PNG files."""
    from fedld.engine.ensemble import load_predictor
    from fedld.engine.ensemble import predict as predict_samples
    from fedld.records.tables import columns_table
    from fedld.records.writer import write_atomically

    predictor = load_predictor(model, method)
    if masks is None and predictor.segments and out is not None:
        masks = out.with_name(f"{out.stem}-masks")
    predictions = predict_samples(predictor, images, bits=bits, masks=masks)
    for note in predictions.notes:
        typer.echo(f"note: {note}", err=True)
    text = columns_table(predictions.columns)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"{len(predictions.columns['name'])} predictions in {out}", err=True)
    if masks is not None:
        typer.echo(f"{predictions.masks} masks in {masks}", err=True)
