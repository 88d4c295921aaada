"""`fedld report`, `fedld watch` and `fedld export`: look at results, while they come in or afterwards."""

from pathlib import Path
from typing import Annotated

import typer

Paths = Annotated[list[Path], typer.Argument(help="run and study directories", show_default=False)]


Primary = Annotated[
    str | None, typer.Option(help="measure that decides; default: the study's own, else accuracy")
]


def report(
    paths: Paths,
    out: Annotated[Path, typer.Option("--out", "-o", help="the page to write")] = Path("report.html"),
    primary: Primary = None,
    title: Annotated[str | None, typer.Option(help="of the page; default: methods and data")] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="also write every figure as SVG, PDF and PNG, its data as CSV, into this folder"),
    ] = None,
) -> None:
    """Write one self-contained page about runs and studies: verdict, charts, tables."""
    from fedld.study.report import write_figures, write_report

    write_report(paths, out, primary, title=title)
    typer.echo(f"report: {out}")
    if figures is not None:
        write_figures(paths, figures, primary)
        typer.echo(f"figures: {figures}")


def watch(
    paths: Paths,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port")] = 0,
) -> None:
    """Show the same page in your browser and update it while a run goes on; loopback only, read-only."""
    from fedld.study.report.page import serve

    serve(paths, port, ready=lambda address: typer.echo(f"watching at {address} (Ctrl-C to stop)"))


def export(
    paths: Paths,
    out: Annotated[Path, typer.Option("--out", "-o", help="folder to write to")] = Path("export"),
    format: Annotated[
        str, typer.Option(help="parquet, csv, latex, tensorboard, mlflow or wandb")
    ] = "parquet",
    primary: Primary = None,
    caption: Annotated[str, typer.Option(help="of the LaTeX table, which is then a float")] = "",
    model: Annotated[
        str | None, typer.Option(help="write the run's model instead: onnx or torchscript")
    ] = None,
) -> None:
    """Write records as tables (Parquet, CSV), the comparison (LaTeX, CSV), tracker files, or the model."""
    if model is not None:
        _export_models(paths, out, model)
        return
    from fedld.frames import FORMATS, load
    from fedld.study.report import write_comparisons
    from fedld.study.trackers import TRACKERS, replay

    if format in TRACKERS:
        replay(paths, format, out)
    else:
        _check(format, [*FORMATS, "latex", *TRACKERS])
        if format in FORMATS:
            load(*paths).write(out, format)
        if format in ("csv", "latex"):
            write_comparisons(paths, out, format, primary, caption=caption)
    typer.echo(f"{format}: {out}")


def _export_models(paths: list[Path], out: Path, format: str) -> None:
    """Export one file per run: `model.onnx`, or with several runs one named after each."""
    from fedld.engine.network import load_model
    from fedld.engine.portable import SUFFIXES, export_model
    from fedld.paths import make_folder

    for path in paths:
        saved = load_model(path)
        make_folder(out)
        stem = "model" if len(paths) == 1 else path.resolve().name
        file = out / f"{stem}{SUFFIXES.get(format, '')}"
        difference = export_model(saved, file, format)
        typer.echo(f"{file}: probabilities as in fedld, to {difference:.1g}")


def _check(name: str, valid: list[str]) -> None:
    from fedld.errors import unknown_name

    if name not in valid:
        raise unknown_name("format", name, valid)
