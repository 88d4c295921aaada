"""Measures in every place: a diverged model has none of an earlier one's, the worst client is measured."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedld
from fedld.errors import FedLDError
from fedld.study.card import make_card
from fedld.study.comparison import compare_runs
from fedld.study.measures import client_scores, value_of
from fedld.study.trackers import scalars
from fedld.study.tune import validation_score
from fedld.tasks.scores import MEASURES

BY_NAME = {measure.name: measure for measure in MEASURES}


def rounds(run, lines):
    """A run with other rounds, in format 1."""
    (run.path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.__dict__.pop("rounds", None)
    return run


def test_a_diverged_final_model_has_no_older_values(write_run):
    good = {"round": 1, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    bad = good | {"round": 2, "accuracy": 0.0, "auroc": None, "loss": None}
    run = rounds(write_run("fedavg", 0), [good | {"accuracy": 0.8, "auroc": 0.773, "loss": 0.4}, bad])
    assert value_of(run, BY_NAME["accuracy"]) == 0
    assert value_of(run, BY_NAME["auroc"]) is None
    assert value_of(run, BY_NAME["auroc"], at=1) == 0.773
    assert "auroc" not in compare_runs("t", [run]).standings[0].values
    with pytest.raises(FedLDError, match="no auroc on the validation images in the last evaluation"):
        validation_score(run, BY_NAME["auroc"])


def test_the_worst_client_is_never_measured_on_training_data(write_run):
    """Where clients have no test samples, the measure is empty, and a comparison by it says why."""
    runs = [write_run(name, 0, accuracy=0.07) for name in ("fedavg", "fedprox")]
    for run in runs:
        line = {"round": 1, "index": 0, "client": "a", "accuracy_before": 0.96}
        (run.path / "clients.jsonl").write_text(json.dumps(line) + "\n")
    comparison = compare_runs("t", runs, primary="worst_client")
    assert all("worst_client" not in standing.values for standing in comparison.standings)
    assert any("no test samples of their own" in line for line in comparison.warnings)
    assert client_scores(runs[0], BY_NAME["accuracy"]) == {}


def sites():
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 2
    return {f"site{k}": (rng.normal(size=(60, 4)).astype(np.float32), labels) for k in range(3)}


def brier(logits, labels):
    return (logits.softmax(1) - nn.functional.one_hot(labels, 2)).square().sum(1)


def test_a_user_metric_is_a_measure_everywhere(tmp_path):
    each = fedld.tasks.as_metric(brier)
    metric = fedld.Metric(sums=each.sums, value=each.value, better="less", title="Brier score", digits=3)
    study = fedld.compare(
        ["fedavg", "fedprox"],
        fedld.Federation.from_arrays(sites()),
        model=nn.Linear(4, 2),
        metrics={"brier": metric},
        seeds=[0],
        rounds=2,
        hold_out=0.2,
        out=tmp_path / "study",
        jobs=0,
    )
    assert any("Brier score" in head for head in study.table[0])
    assert ",brier," in (tmp_path / "study/table.csv").read_text()
    page = (tmp_path / "study/report.html").read_text()
    assert 'id="group-1-brier"' in page or "Brier score over rounds" in page
    result = study.results["fedavg", 0]
    assert "brier" in scalars(result.rounds[-1])
    assert "Brier score" in make_card(result.path).to_markdown()
    assert result._run.measures["brier"].better == "less"
    pytest.importorskip("polars")
    frames = fedld.load(tmp_path / "study")
    assert "brier" in frames.rounds.columns
    assert "final_brier" in frames.runs.columns
    assert "brier" in set(frames.tests["measure"])


def test_data_frames_need_neither_torch_nor_matplotlib():
    code = (
        "import sys; from fedld.frames import load; load(sys.argv[1]); "
        "assert not {'torch', 'matplotlib'} & set(sys.modules), 'heavy'"
    )
    from tests.records.test_format1 import OLD

    pytest.importorskip("polars")
    done = subprocess.run([sys.executable, "-c", code, str(OLD)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert torch is not None
