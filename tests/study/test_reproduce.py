import json

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from fedld.cli import app
from fedld.config.resolve import make_method
from fedld.errors import FedLDError
from fedld.study.comparison import compare_runs
from fedld.study.paper.tables import Column, Reproduced, plan, run_plan

TINY = {"dataset": "digits", "model": "cnn", "image_size": 8, "rounds": 1, "batch_size": 50}


def run(planned, out, resume=False, progress=lambda line: None):
    return run_plan(planned, out, resume=resume, jobs=1, progress=progress)


def test_table1_beside_the_papers_numbers(tmp_path):
    settings = TINY | {"fedbn": {"lr": 0.02}}
    arms, splits = ["fedavg", "fedbn"], ["retina-split1"]
    planned = plan("table1", settings, [0, 1], arms=arms, splits=splits, command="c", primary="auroc")
    result = run(planned, tmp_path)
    written = json.loads((tmp_path / "table.json").read_text())
    (column,) = written["columns"]
    fedavg, fedbn = column["rows"]
    assert fedavg["final_mean"] == pytest.approx(np.mean(fedavg["final"]))
    assert fedbn["difference"] == pytest.approx(np.mean(np.subtract(fedbn["auroc"], fedavg["auroc"])))
    assert fedbn["personal"] is not None
    assert fedavg["personal"] is None
    assert column["paper"]["fedbn"] == 83.91
    assert "stand in" in written["title"]
    page = (tmp_path / "table.md").read_text()
    assert "83.91*" in page
    assert "p (Holm)" in page
    assert "$\\pm$" in (tmp_path / "table.tex").read_text()
    assert f"retina-split1,fedbn,1,accuracy,{fedbn['final'][1]}" in (tmp_path / "table.csv").read_text()
    assert (tmp_path / "differences.png").exists()
    assert "<h3>The paper&#39;s numbers (Table 1)</h3>" in (tmp_path / "report.html").read_text()
    rates = {arm: experiment.lr for arm, experiment in planned.studies["retina-split1"].cells}
    assert rates == {"fedavg": 0.05, "fedbn": 0.02}

    seen = []
    assert run(planned, tmp_path, resume=True, progress=seen.append).to_json() == result.to_json()
    assert seen == []  # nothing is run twice


def test_the_table_says_why(tmp_path):
    settings = TINY | {"rounds": 2, "decompose": 2}
    arms, splits = ["fedavg", "fedld", "local"], ["retina-split3"]
    run(plan("table1", settings, [0, 1], arms=arms, splits=splits, command="c"), tmp_path)
    (column,) = json.loads((tmp_path / "table.json").read_text())["columns"]
    fedavg, fedld, local = column["causes"]
    assert (local["step"], local["aggregation"], local["total"]) == (None, None, None)
    assert local["shift"] is not None
    assert fedavg["step"] == pytest.approx(1)
    assert fedavg["cosine"] == pytest.approx(1)
    ratios, terms = [], []
    for seed in (0, 1):
        file = tmp_path / f"retina-split3/runs/fedld-seed{seed}/rounds.jsonl"
        first, last = (json.loads(line) for line in file.read_text().splitlines())
        ratios.append((first["norm_ratio"] + last["norm_ratio"]) / 2)
        terms.append(last["shift_loss"])
    assert fedld["step"] == pytest.approx(np.mean(ratios))
    assert fedld["shift"] == pytest.approx(np.mean(terms))
    assert fedld["local"] + fedld["shift"] + fedld["aggregation"] == pytest.approx(fedld["total"])
    assert f"| fedld | {fedld['step']:.2f} |" in (tmp_path / "table.md").read_text()


def test_a_table_without_runs_that_failed_says_so_by_its_exit_code(tmp_path):
    words = [
        "reproduce",
        "table1",
        "--dataset",
        "digits",
        "--model",
        "cnn",
        "--image-size",
        "8",
        "--rounds",
        "1",
    ]
    words += ["--methods", "fedavg,fedprox", "--splits", "retina-split1", "--seeds", "0", "--jobs", "0"]
    done = CliRunner().invoke(app, [*words, "--set", "fedprox.lr=1e30", "--out", str(tmp_path / "table")])
    assert done.exit_code == 3, done.output
    assert "fedprox failed" in done.output
    assert (tmp_path / "table" / "table.md").exists()


def test_table2_switches_one_part_at_a_time(tmp_path):
    planned = plan("table2", TINY, [0], command="c")
    for split, lam in (("retina-split1", 0.1), ("retina-split2", 0.03), ("retina-split3", 0.03)):
        methods = {arm: make_method(experiment) for arm, experiment in planned.studies[split].cells}
        assert [m.rule.name for m in methods.values()] == ["mean", "principal", "mean", "principal"]
        assert [getattr(m.objective, "lam", 0) for m in methods.values()] == [0, 0, lam, lam]
    assert [e.alpha for e in (study.cells[0][1] for study in planned.studies.values())] == [100.0, 1.0, 0.5]


def test_table2_also_by_site_for_who_asks(tmp_path):
    planned = plan("table2", TINY, [0], splits=["covid-fl"], command="c")
    methods = [make_method(experiment) for _, experiment in planned.studies["covid-fl"].cells]
    assert [getattr(m.objective, "lam", 0) for m in methods] == [0, 0, 0.01, 0.01]
    assert run(planned, tmp_path).columns[0].paper == {}
    with pytest.raises(FedLDError, match="unknown split of table3 'covid-fl'"):
        plan("table3", TINY, [0], splits=["covid-fl"])


def test_table3_samples_a_tenth_of_fifty_clients(tmp_path):
    planned = plan("table3", TINY, [0], arms=["fedavg", "fedld"], command="c")
    result = run(planned, tmp_path)
    (experiment, _) = (e for _, e in planned.studies["retina-50-clients"].cells)
    assert (experiment.clients, experiment.sample_rate, experiment.alpha) == (50, 0.1, 0.5)
    assert result.columns[0].paper["fedld"] == 71.30


def test_npz_columns_give_the_published_splits_and_sites(tmp_path):
    digits = load_digits()
    n = len(digits.target)
    clients = np.array([f"client_{i % 5 + 1}" for i in range(n)])
    sites = np.array(list("ab"))[np.arange(n) % 2]
    file = tmp_path / "own.npz"
    np.savez(
        file, images=digits.images.astype(np.uint8), labels=digits.target, site=sites, sslfl_split2=clients
    )
    settings = TINY | {"dataset": f"npz:{file}"}
    planned = plan("table1", settings, [0], arms=["fedavg"], command="c")
    by = {split: study.cells[0][1] for split, study in planned.studies.items()}
    assert (by["retina-split1"].partition, by["retina-split1"].alpha) == ("dirichlet", 100.0)
    assert (by["retina-split2"].split, by["retina-split2"].partition) == (2, "auto")
    assert by["covid-fl"].partition == "site"
    assert planned.splits["retina-split2"] == "published split 2"
    paper = plan("table1", settings, [0], scale="paper", arms=["fedld"], command="c")
    assert {study.cells[0][1].weight_decay for study in paper.studies.values()} == {5e-4}


def test_a_data_root_gives_the_published_data(tmp_path):
    planned = plan("table1", {"data_root": tmp_path}, [0], scale="paper", command="c")
    found = [(e.dataset, e.split, e.model) for e in (s.cells[0][1] for s in planned.studies.values())]
    assert found == [("retina", k, "resnet50") for k in (1, 2, 3)] + [("covid-fl", None, "resnet50")]
    small = plan("table2", {"data_root": tmp_path}, [0], command="c")
    assert [s.cells[0][1].dataset for s in small.studies.values()] == ["retina"] * 3


def test_what_cannot_be_is_said():
    with pytest.raises(FedLDError, match="did you mean 'covid-fl'"):
        plan("table1", TINY, [0], splits=["covidfl"])
    with pytest.raises(FedLDError, match="unknown row of table 2 'bth'"):
        plan("table2", TINY, [0], arms=["bth"])
    with pytest.raises(FedLDError, match="needs the published images"):
        plan("table1", {}, [0], scale="paper")


def test_a_method_without_a_global_model_has_only_its_personal_column(tmp_path, write_run):
    runs = [write_run("fedavg", s, accuracy=a) for s, a in ((0, 0.5), (1, 0.7))]
    runs += [write_run("local", s, personal_accuracy=a) for s, a in ((0, 0.4), (1, 0.6))]
    table = compare_runs("t", runs, "fedavg")
    result = Reproduced("table1", "t", "c", [Column("retina-split1", "data", table, {"fedavg": 83.63})])
    result.write(tmp_path)
    page = (tmp_path / "table.md").read_text()
    assert "| fedavg | 60.00 ± 14.14 | 83.63 |" in page
    assert "| local | 50.00 ± 14.14 (personalised) | - |" in page
