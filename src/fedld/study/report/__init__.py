"""The report: one self-contained page about a run, a study, or several of them."""

from collections.abc import Sequence
from pathlib import Path

from fedld.engine.records import write_atomically
from fedld.errors import FedLDError
from fedld.study.report.build import build
from fedld.study.report.page import render
from fedld.study.runs import read

__all__ = ["write_figures", "write_report"]


def write_report(paths: Sequence[Path], out: Path) -> None:
    """Write the page of some runs and studies."""
    study = read(paths)
    page = render(study, build(study))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode())
    except OSError as error:
        raise FedLDError(f"cannot write '{out}': {error.strerror}") from None


def write_figures(paths: Sequence[Path], folder: Path) -> None:
    """Write every figure as SVG and PNG, and its data as CSV; a folder each where settings differ."""
    groups = build(read(paths))
    try:
        for group in groups:
            for chart in group.charts():
                chart.save(folder / group.key if len(groups) > 1 else folder)
    except OSError as error:
        raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None
