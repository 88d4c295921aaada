"""Run directories of format 1 are read, compared and reported; files of a later format are refused.

`format1/` is a study that was made at commit 4665908, without models, checkpoints and states.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedld
from fedld.errors import FedLDError
from fedld.records.format1 import upgrade_client, upgrade_round, upgrade_summary
from fedld.records.reader import read, read_run
from fedld.study.comparison import compare_runs
from fedld.study.report import write_report

OLD = Path(__file__).parent / "format1"


def test_an_old_study_compares_as_it_did():
    study = read([OLD])
    comparison = compare_runs(study.name, study.runs, study.baseline, study.primary)
    before = json.loads((OLD / "table.json").read_text())
    now = comparison.to_json()
    assert before["verdict"].split(",")[0] in now["verdict"]
    for old, new in zip(before["rows"], now["rows"], strict=True):
        assert new["values"]["kappa"] == old["further"]["kappa"]
        for key in ("label", "seeds", "final", "last5", "best", "auroc", "loss", "worst_client", "personal"):
            assert new[key] == (pytest.approx(old[key]) if key in ("last5", "best") else old[key]), key


def test_an_old_run_has_the_measures_it_had():
    run = read_run(OLD / "runs/ditto-seed0")
    line = json.loads((run.path / "rounds.jsonl").read_text().splitlines()[-1])
    assert list(run.scores("accuracy").values())[-1] == line["accuracy"]
    assert list(run.scores("accuracy", "personal").values())[-1] == line["personal_accuracy"]
    assert list(run.scores("loss", "validation").values())[-1] == line["validation_loss"]
    assert list(run.scores("kappa").values())[-1] == line["metrics"]["kappa"]
    assert run.summary["test"]["final"]["accuracy"] == line["accuracy"]
    assert list(run.measures)[-1] == "kappa"


def test_upgrading_twice_is_upgrading_once():
    run = OLD / "runs/ditto-seed0"
    for line in map(json.loads, (run / "rounds.jsonl").read_text().splitlines()):
        assert upgrade_round(upgrade_round(line)) == upgrade_round(line)
    for line in map(json.loads, (run / "clients.jsonl").read_text().splitlines()):
        assert upgrade_client(upgrade_client(line)) == upgrade_client(line)
    summary = json.loads((run / "summary.json").read_text())
    assert upgrade_summary(upgrade_summary(summary)) == upgrade_summary(summary)


def test_an_old_study_is_a_page_and_data_frames(tmp_path):
    write_report([OLD], tmp_path / "page.html")
    assert "kappa" in (tmp_path / "page.html").read_text()
    pytest.importorskip("polars")
    frames = fedld.load(OLD)
    assert {"accuracy", "kappa", "validation_loss", "personal_accuracy"} <= set(frames.rounds.columns)
    assert {"loss_before", "accuracy_after"} <= set(frames.clients.columns)
    assert {"final_accuracy", "last5_accuracy", "personal_final_accuracy"} <= set(frames.runs.columns)
    assert set(frames.tests["measure"]) == {"accuracy", "kappa"}


@pytest.mark.parametrize("format", [3, 0, "two", None])
def test_a_later_format_is_refused_in_a_sentence(format, tmp_path):
    shutil.copytree(OLD, tmp_path / "study")
    facts = {"format": format, "task": "classification", "measures": []}
    (tmp_path / "study/runs/fedavg-seed0/run.json").write_text(json.dumps(facts))
    with pytest.raises(FedLDError, match=r"run.json' has format .*reads formats 1 to 2"):
        read([tmp_path / "study"])
    page = tmp_path / "p.html"
    command = [sys.executable, "-m", "fedld", "report", str(tmp_path / "study"), "-o", str(page)]
    assert format != 3 or subprocess.run(command, capture_output=True).returncode == 2
    assert not page.exists()


def test_a_study_of_a_later_format_is_refused(tmp_path):
    shutil.copytree(OLD, tmp_path / "study")
    index = json.loads((OLD / "study.json").read_text()) | {"format": 9}
    (tmp_path / "study/study.json").write_text(json.dumps(index))
    with pytest.raises(FedLDError, match=r"study\.json' has format 9"):
        read([tmp_path / "study"])
