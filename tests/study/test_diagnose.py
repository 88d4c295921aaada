import json

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedld.analysis.diagnosis.page import diagnose_run
from fedld.cli import app
from fedld.config.experiment import make_experiment
from fedld.engine import loop
from fedld.errors import FedLDError

SWAPPED = ("e", "f")


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Odd or even digits at six sites; two of them call odd what the others call even."""
    digits = load_digits()
    rng = np.random.default_rng(0)
    site = rng.permutation(np.arange(len(digits.target)) % 6)
    split = np.where(rng.random(len(site)) < 0.2, "test", "train")
    names = np.array(list("abcdef"))[site]
    odd = digits.target % 2
    labels = np.where(np.isin(names, SWAPPED) & (split == "train"), 1 - odd, odd)
    images = (digits.images * 15).astype(np.uint8)
    path = tmp_path_factory.mktemp("sites") / "sites.npz"
    np.savez(path, images=images, labels=labels, site=names, split=split)
    return f"npz:{path}"


def run(out, **settings):
    shared = {
        "model": "cnn",
        "rounds": 6,
        "lr": 0.05,
        "momentum": 0.9,
        "decompose": 3,
        "workers": 0,
        "batch_size": 20,
    }
    loop.run(make_experiment(shared | settings), out)
    return out


def test_names_the_conflict_of_two_opposed_groups(tmp_path, sites):
    out = run(tmp_path / "run", dataset=sites, partition="site", method="fedld")
    answer = CliRunner().invoke(app, ["diagnose", str(out)])
    assert answer.exit_code == 0, answer.output
    assert "opposed_groups" in answer.output
    found = {f["check"]: f for f in json.loads((out / "diagnosis.json").read_text())["findings"]}
    assert sorted(found["opposed_groups"]["numbers"]["minority"]) == list(SWAPPED)
    page = (out / "diagnosis.md").read_text()
    assert "a, b, c, d against e, f" in page
    assert "opposed_cosine = -0.2" in page


def test_is_quiet_on_an_iid_federation(tmp_path):
    out = run(tmp_path / "run", dataset="digits", partition="iid", clients=6, method="fedavg")
    diagnosis = diagnose_run(out)
    assert diagnosis.warnings == []
    assert "Nothing that was measured shows harm" in diagnosis.to_markdown()
    assert [finding.check for finding in diagnosis.findings] == ["dominant_term"]


def test_before_training_labels_speak():
    def ask(*settings):
        answer = CliRunner().invoke(app, ["diagnose", "--dataset", "digits", *settings, "--json"])
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    skewed = ask("--partition", "classes", "--clients", "5")
    assert "label_skew" in [finding["check"] for finding in skewed["findings"]]
    assert "loss decomposition" in skewed["not_measured"]
    assert ask("--partition", "iid", "--clients", "5")["findings"] == []


def test_names_are_no_html(tmp_path):
    """A site called <img src=...> was one in diagnosis.md."""
    evil = "<img src=x onerror=alert(1)>"
    labels = np.repeat([0, 1], 100)
    images = np.zeros((200, 8, 8), np.uint8)
    site = np.where(labels, evil, "other")
    split = np.where(np.arange(200) % 5, "train", "test")
    np.savez(tmp_path / "evil.npz", images=images, labels=labels, site=site, split=split)
    words = ["--dataset", f"npz:{tmp_path / 'evil.npz'}", "--partition", "site", "--out", str(tmp_path)]
    answer = CliRunner().invoke(app, ["diagnose", *words])
    assert answer.exit_code == 0, answer.output
    text = (tmp_path / "diagnosis.md").read_text()
    assert "<img" not in text
    assert "&lt;img src=x" in text


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(FedLDError, match="holds no run"):
        diagnose_run(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(FedLDError, match="study"):
        diagnose_run(tmp_path)
    answer = CliRunner().invoke(app, ["diagnose", str(tmp_path), "--dataset", "digits"])
    assert isinstance(answer.exception, FedLDError)
