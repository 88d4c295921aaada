"""`fedld predict`: what a trained model says of pictures or of a table's rows, as CSV and masks as PNG."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

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
    from fedld.data.mask_files import new_mask_folder
    from fedld.data.pictures import read_pictures
    from fedld.data.rows import read_rows
    from fedld.engine.ensemble import load_predictor
    from fedld.errors import FedLDError
    from fedld.records.table import columns_table
    from fedld.records.writer import write_atomically

    saved = load_predictor(model, method)
    for note in saved.notes:
        typer.echo(f"note: {note}", err=True)
    if masks is not None and not saved.segments:
        raise FedLDError(f"--masks is for segmentation, and this model is of {saved.facts.task}")
    if masks is None and saved.segments and out is not None:
        masks = out.with_name(f"{out.stem}-masks")
    folder = None if masks is None else new_mask_folder(masks)
    columns: dict[str, list[str]] = {"name": []}
    parts: Iterable[tuple[list[str], Any]]
    if saved.facts.columns:
        parts = [read_rows(images, saved.facts.columns)]
    else:
        channels, height, width = saved.facts.input_shape
        parts = read_pictures(images, (channels, height, width), bits)
    written: set[str] = set()
    for names, samples in parts:
        outputs = saved.outputs(samples)
        columns["name"] += names
        for name, cells in saved.described(outputs).items():
            columns.setdefault(name, []).extend(cells)
        if folder is not None:
            _write_masks(folder, names, saved.masks(outputs), written)
    text = columns_table(columns)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_atomically(out, text.encode())
        typer.echo(f"{len(columns['name'])} predictions in {out}", err=True)
    if folder is not None:
        typer.echo(f"{len(written)} masks in {folder}", err=True)


def _write_masks(folder: Path, pictures: list[str], masks: Any, written: set[str]) -> None:
    """Write the masks of some pictures; none of a picture for which the model gives no finite number."""
    from fedld.data.mask_files import mask_name, mask_png
    from fedld.records.writer import write_atomically

    for picture, mask in zip(pictures, masks, strict=True):
        if mask.min() < 0:
            typer.echo(f"note: the model gives no finite number for {picture}: no mask", err=True)
            continue
        file = mask_name(picture, written)
        written.add(file)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / file, mask_png(mask))
