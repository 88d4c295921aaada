"""The model card of real runs."""

import hashlib
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedld.analysis.intervals import accuracy_interval
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.engine.loop import run
from fedld.errors import FedLDError
from fedld.records.tables import read_predictions
from fedld.study.card import make_card
from fedld.tasks.scores import auroc

TINY = {"rounds": 1, "model": "cnn", "workers": 0, "image_size": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sites, one with a name that Markdown and spreadsheets would mistake; three pictures per patient."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "sites.npz"
    labels = np.arange(120) // 3 % 2
    images = rng.integers(0, 150, (120, 8, 8), dtype=np.uint8) + (60 * labels[:, None, None]).astype(np.uint8)
    site = np.where(np.arange(120) < 60, "=a|b", "c")
    patient = np.array([f"p{k // 3}" for k in range(120)])
    split = np.where(np.arange(120) // 3 % 10 < 6, "train", "test")
    names = np.array(["healthy", "sick"])
    np.savez(file, images=images, labels=labels, site=site, patient=patient, split=split, classes=names)
    return file


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(make_experiment(TINY | {"dataset": f"npz:{data}"}), out)
    return out


def test_a_card_says_what_the_run_recorded(done):
    result = CliRunner().invoke(app, ["card", str(done)])
    assert result.exit_code == 0, result.output
    card, summary = (json.loads((done / f"{name}.json").read_text()) for name in ("card", "summary"))
    told = card["results"]["all"]
    assert told["accuracy"]["value"] == summary["test"]["final"]["accuracy"]
    assert told["auroc"]["value"] == pytest.approx(summary["test"]["final"]["auroc"], abs=1e-6)
    assert (told["pictures"], told["patients"]) == (48, 16)
    table = read_predictions(done / "predictions.csv")
    for name, one in card["results"]["sites"].items():
        mine = np.array(table.columns["site"]) == name
        labels = np.array([table.classes.index(label) for label in table.columns["label"]])[mine]
        right = (np.array(table.columns["label"]) == table.columns["predicted"])[mine]
        patients = np.array(table.columns["patient"])[mine]
        assert one["pictures"] == mine.sum() == 24
        assert one["accuracy"]["low"] == accuracy_interval(right, patients).low
        assert one["auroc"]["value"] == pytest.approx(
            auroc(np.log(table.probabilities[mine]), labels), abs=1e-6
        )
    assert set(card["results"]["sites"]) == {"=a|b", "c"}
    assert card["configuration"]["model"] == "cnn"
    assert [client["train"] for client in card["data"]["clients"]] == [36, 36]
    assert json.loads(card["model_file"]["fedld"])["classes"] == ["healthy", "sick"]


def test_the_page_has_every_part(done):
    text = make_card(done, "healthy", 0.75).to_markdown()
    for part in ("Results", "Data", "Participation", "Limitations", "Method", "How to use it"):
        assert f"\n## {part}" in text
    assert "sensitivity for healthy at specificity 0.75" in text
    assert "| =a\\|b |" in text
    assert "Few test pictures, so hardly sure: =a|b (24), c (24)." in text
    assert "fedld predict" in text
    widths = [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("| =a")]
    assert widths == [6, 6, 5]  # results, data, participation: the name did not make a column


def test_names_are_no_formulas(done):
    assert "'=a|b" in (done / "predictions.csv").read_text()
    assert "=a|b" in read_predictions(done / "predictions.csv").columns["site"]


def test_a_run_without_a_global_model_has_a_card_too(data, tmp_path):
    run(make_experiment(TINY | {"dataset": f"npz:{data}", "method": "local"}), tmp_path / "run")
    text = make_card(tmp_path / "run").to_markdown()
    assert "every client keeps its own" in text
    assert "has no model file" in text


def test_bad_input_is_one_sentence(done, tmp_path):
    with pytest.raises(FedLDError, match="holds no run"):
        make_card(tmp_path)
    with pytest.raises(FedLDError, match="unknown class 'sik': did you mean 'sick'"):
        make_card(done, "sik")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in done.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "predictions.csv").write_text("name,label\nx,y\n")
    with pytest.raises(FedLDError, match="is damaged"):
        make_card(copy)
    (copy / "summary.json").unlink()
    with pytest.raises(FedLDError, match="unfinished"):
        make_card(copy)


def test_names_are_no_html(data, tmp_path):
    """A class or site called <img src=...> was one in card.md."""
    evil = "<img src=x onerror=alert(1)>"
    with np.load(data) as archive:
        arrays = dict(archive) | {"classes": np.array(["healthy", evil])}
    arrays["site"] = np.where(arrays["site"] == "c", evil, "other")
    np.savez(tmp_path / "evil.npz", **arrays)
    run(make_experiment(TINY | {"dataset": f"npz:{tmp_path / 'evil.npz'}"}), tmp_path / "run")
    make_card(tmp_path / "run").write(tmp_path)
    text = (tmp_path / "card.md").read_text()
    assert "<img" not in text
    assert text.count("&lt;img src=x") >= 3


def test_a_card_has_date_checksum_owner_licence_and_intended_use(done, tmp_path):
    words = ["--use", "research only", "--owner", "Hospital A", "--licence", "CC-BY-4.0"]
    result = CliRunner().invoke(app, ["card", str(done), "--out", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    card, told = (tmp_path / "card.md").read_text(), json.loads((tmp_path / "card.json").read_text())
    digest = hashlib.sha256((done / "model.safetensors").read_bytes()).hexdigest()
    assert told["model_sha256"] == digest
    assert f"`{digest}`" in card
    assert told["statements"] == {"use": "research only", "owner": "Hospital A", "licence": "CC-BY-4.0"}
    assert f"| training finished (UTC) | {told['summary']['finished']} |" in card
    silent = make_card(done).to_markdown()
    assert "| intended use | not stated: give --use |" in silent


def test_a_card_does_not_claim_clients_that_the_data_do_not_have(done):
    card = make_card(done).to_markdown()
    assert "rounds with 2 clients" in card
    assert "clients = 5  # not used: the data name 2 clients" in card
