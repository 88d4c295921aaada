"""A study of two optimisers as rows of their own: its card, its diagnosis, title and caption."""

import json

import pytest
from typer.testing import CliRunner

from fedld.cli import app
from fedld.errors import FedLDError
from fedld.study.card import make_study_card

SETTINGS = ["--dataset", "digits", "--clients", "2", "--rounds", "1", "--set", "local_steps=2"]


def call(*words):
    answer = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "study"
    rows = [
        "--methods",
        "sgd=fedavg,adamw=fedavg",
        "--set",
        "adamw.optimiser=adamw",
        "--set",
        "adamw.lr=0.001",
    ]
    call("compare", *SETTINGS, *rows, "--seeds", "0,1", "--jobs", "1", "--out", out)
    return out


def test_a_method_is_compared_with_itself(study):
    runs = {path.name: (path / "config.toml").read_text() for path in (study / "runs").iterdir()}
    assert sorted(runs) == ["adamw-seed0", "adamw-seed1", "sgd-seed0", "sgd-seed1"]
    assert 'optimiser = "adamw"' in runs["adamw-seed1"]
    assert 'optimiser = "sgd"' in runs["sgd-seed1"]
    assert (study / "table.csv").read_text().count("adamw") > 2


def test_labels_are_different():
    with pytest.raises(FedLDError, match="two methods have one label"):
        CliRunner().invoke(app, ["compare", "--methods", "a=fedavg,a=fedprox"], catch_exceptions=False)


def test_a_study_has_a_card(study, tmp_path):
    call("card", study, "--method", "adamw", "--out", tmp_path, "--owner", "us")
    text, facts = (tmp_path / "card.md").read_text(), json.loads((tmp_path / "card.json").read_text())
    assert "# Model card: adamw on digits, 2 runs" in text
    assert sorted(facts["runs"]) == ["adamw-seed0", "adamw-seed1"]
    for run in facts["runs"].values():
        assert run["model_sha256"] in text
    assert "fedld predict STUDY PICTURES --method adamw" in text
    assert "| owner | us |" in text
    with pytest.raises(FedLDError, match="sgd, adamw: name one with --method"):
        make_study_card(study)
    with pytest.raises(FedLDError, match="'ada' is none of them"):
        make_study_card(study, "ada")


def test_a_study_has_a_diagnosis(study, tmp_path):
    call("diagnose", study, "--out", tmp_path)
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert found["title"] == "sgd, adamw on digits"
    assert "seeds)" in found["findings"][0]["sentence"]


def test_titles_and_captions(study, tmp_path):
    call("report", study, "--title", "Two <optimisers>", "--out", tmp_path / "page.html")
    assert "<title>Two &lt;optimisers&gt;" in (tmp_path / "page.html").read_text()
    call("export", study, "--format", "latex", "--caption", "SGD & AdamW", "--out", tmp_path)
    table = (tmp_path / "comparison.tex").read_text()
    assert "\\caption{SGD \\& AdamW}" in table
    assert table.rstrip().endswith("\\end{table}")
