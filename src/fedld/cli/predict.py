"""`fedld predict`: what a trained model says of pictures or of a table's rows, as CSV."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer


def predict(
    model: Annotated[Path, typer.Argument(help="run, its model.safetensors, or study (mean over seeds)")],
    images: Annotated[Path, typer.Argument(help="pictures: file, folder, npz; table: CSV, parquet")],
    out: Annotated[Path | None, typer.Option(help="CSV file to write; default: the terminal")] = None,
    bits: Annotated[int | None, typer.Option(help="bits that 16-bit files really use", min=8, max=16)] = None,
    method: Annotated[str | None, typer.Option(help="of a study: which method's models")] = None,
) -> None:
    """Give probabilities, values or risks for every picture or row of a table, as CSV."""
    from fedld.data.pictures import read_pictures
    from fedld.data.rows import read_rows
    from fedld.engine.ensemble import load_predictor
    from fedld.records.table import columns_table
    from fedld.records.writer import write_atomically

    saved = load_predictor(model, method)
    for note in saved.notes:
        typer.echo(f"note: {note}", err=True)
    columns: dict[str, list[str]] = {"name": []}
    parts: Iterable[tuple[list[str], Any]]
    if saved.facts.columns:
        parts = [read_rows(images, saved.facts.columns)]
    else:
        channels, height, width = saved.facts.input_shape
        parts = read_pictures(images, (channels, height, width), bits)
    for names, samples in parts:
        columns["name"] += names
        for name, cells in saved.columns(samples).items():
            columns.setdefault(name, []).extend(cells)
    text = columns_table(columns)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"{len(columns['name'])} predictions in {out}", err=True)
