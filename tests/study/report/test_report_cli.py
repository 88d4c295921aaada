"""`fedld report` and `fedld export` as commands."""

import subprocess
import sys

import pytest

import fedld

CALL = (
    "import typer, sys; from fedld.cli.report import report, watch, export; app = typer.Typer();"
    "[app.command()(c) for c in (report, watch, export)]; app()"
)


def call(*arguments):
    command = [sys.executable, "-c", CALL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_report_and_figures(study, tmp_path):
    run = study / "runs/fedld-seed0"
    done = call("report", run, "-o", tmp_path / "r.html", "--figures", tmp_path / "f")
    assert done.returncode == 0, done.stderr
    assert "fedld run --config" in (tmp_path / "r.html").read_text()
    assert (tmp_path / "f/cross-loss.png").read_bytes().startswith(b"\x89PNG")


def test_export_writes_tables(study, tmp_path):
    pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")
    done = call("export", study, "--format", "csv", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rounds.csv").read_text().count("\n") == 9 * 8 + 1


def test_an_unknown_format_offers_the_nearest(study, tmp_path):
    done = call("export", study, "--format", "parket", "-o", tmp_path)
    assert "did you mean 'parquet'" in done.stderr


def test_load_is_part_of_the_package(study):
    pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")
    assert fedld.load(study).runs.height == 9
