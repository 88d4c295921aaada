"""`fedld report` and `fedld export` as commands."""

import pytest
from typer.testing import CliRunner

import fedld
from fedld.cli import app
from fedld.errors import FedLDError


def call(*arguments):
    """In this process: starting Python and torch would cost more than the command."""
    return CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)


def test_report_figures_and_data_as_files(make_study, tmp_path):
    study = make_study(tmp_path / "s", methods=("fedavg", "fedld"), seeds=(0,), rounds=3, clients=4)
    done = call("report", study, "-o", tmp_path / "r.html", "--figures", tmp_path / "f")
    assert done.exit_code == 0
    assert "fedld compare --out demo" in (tmp_path / "r.html").read_text()
    names = {path.name for path in (tmp_path / "f").iterdir()}
    for chart in ("accuracy", "decomposition", "cross-loss", "cosine", "spectrum", "confusion", "labels"):
        assert {f"{chart}.{kind}" for kind in ("svg", "pdf", "png", "csv")} <= names
    rows = (tmp_path / "f/decomposition.csv").read_text().splitlines()
    assert rows[0] == "method,round,local,shift,aggregation,global"
    values = [float(x) for x in rows[1].split(",")[2:]]
    assert sum(values[:3]) == pytest.approx(values[3])


def test_figures_for_papers_have_names_vector_fonts_and_a_white_ground(make_study, tmp_path):
    from PIL import Image

    from fedld.records.reader import read
    from fedld.study.report.chart import looks
    from fedld.study.report.curves import measure_chart

    runs = read([make_study(tmp_path / "s", methods=("fedavg", "fedld"), seeds=(0,), rounds=3)]).runs
    chart = measure_chart(runs, runs[0].measures["accuracy"], looks(["fedavg", "fedld"]))
    chart.save(tmp_path)
    text = (tmp_path / "accuracy.svg").read_text()
    assert "var(--" not in text
    assert "<!-- fedld -->" in text  # the legend's name, drawn as outlines
    assert "<text" not in text
    with Image.open(tmp_path / "accuracy.png") as image:
        assert image.info["dpi"] == pytest.approx((300, 300), abs=1)
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
    assert (tmp_path / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    assert "fedld</button>" not in chart.inline("x", "label")  # the page's legend is not drawn twice
    assert "fedld" not in chart.inline("x", "label")


def test_export_writes_tables(study, tmp_path):
    pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")
    assert call("export", study, "--format", "csv", "-o", tmp_path).exit_code == 0
    assert (tmp_path / "rounds.csv").read_text().count("\n") == 9 * 8 + 1
    assert "\nfedld,2,accuracy," in (tmp_path / "comparison.csv").read_text()
    assert call("export", study, "--format", "latex", "-o", tmp_path).exit_code == 0
    assert "fedld & " in (tmp_path / "comparison.tex").read_text()


def test_the_primary_measure_of_a_page_can_be_chosen(study, tmp_path):
    with pytest.raises(FedLDError, match=r"unknown primary measure 'balanced'.*balanced_accuracy"):
        call("report", study, "-o", tmp_path / "r.html", "--primary", "balanced")
    assert not (tmp_path / "r.html").exists()


def test_an_unknown_format_offers_the_nearest(study, tmp_path):
    with pytest.raises(FedLDError, match="did you mean 'parquet'"):
        call("export", study, "--format", "parket", "-o", tmp_path)


def test_load_is_part_of_the_package(study):
    pytest.importorskip("polars", reason="polars is not installed: pip install 'fedld[analysis]'")
    assert fedld.load(study).runs.height == 9
