"""The report: one self-contained page about a run, a study, or several of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedld.errors import FedLDError
from fedld.records.reader import StudyRecords, clean, read
from fedld.records.writer import write_atomically
from fedld.study.measures import check_primary, measures_of
from fedld.study.report.build import MakeTable, build, compare_groups
from fedld.study.report.page import render

__all__ = ["write_comparisons", "write_figures", "write_report"]


def write_report(
    paths: Sequence[Path],
    out: Path,
    primary: str | None = None,
    tables: Sequence[MakeTable] = (),
    title: str | None = None,
) -> None:
    """Write the page of some runs and studies.

    Args:
        paths: their directories.
        out: the page.
        primary: the measure that decides; default: the study's.
        tables: makers of further tables beside the comparison.
        title: of the page; default: methods and data.

    Raises:
        FedLDError: the page cannot be written.
    """
    study = _read(paths, primary)
    if title is not None:
        study = replace(study, name=clean(title))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)  # before the drawing, which takes its time
        write_atomically(out, render(study, build(study, tables)).encode())
    except OSError as error:
        raise FedLDError(f"cannot write '{out}': {error.strerror}") from None


def write_comparisons(
    paths: Sequence[Path], folder: Path, format: str, primary: str | None = None, caption: str = ""
) -> None:
    """Write the table of every group of comparable runs: comparison.tex or comparison.csv."""
    study = _read(paths, primary)
    groups = [comparison for comparison, _ in compare_groups(study)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for k, comparison in enumerate(groups):
            name = "comparison" if len(groups) == 1 else f"comparison-{k + 1}"
            if format == "latex":
                text = comparison.to_latex(study.command or "", caption)
                write_atomically(folder / f"{name}.tex", text.encode())
            else:
                write_atomically(folder / f"{name}.csv", comparison.to_csv().encode())
    except OSError as error:
        raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None


def _read(paths: Sequence[Path], primary: str | None) -> StudyRecords:
    study = read(paths)
    if primary is None:
        return study
    return replace(study, primary=check_primary(primary, measures_of(study.runs)))


def write_figures(paths: Sequence[Path], folder: Path, primary: str | None = None) -> None:
    """Write every figure as SVG, PDF and PNG, and its data as CSV; a folder each where settings differ."""
    groups = build(_read(paths, primary))
    try:
        for group in groups:
            for chart in group.charts():
                chart.save(folder / group.key if len(groups) > 1 else folder)
    except OSError as error:
        raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None
