"""Cross-validation: folds of whole patients, every image tested once, corrected intervals."""

import csv
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

import fedld
from fedld.analysis.statistics import mean_interval, paired_difference
from fedld.data import DataSpec, Federation, load
from fedld.data.splits import assign_folds
from fedld.errors import FedLDError
from fedld.records.reader import read_one
from fedld.study.compare import reopen, run_study

SMALL = {"rounds": 2, "workers": 0, "progress": False, "data": {"patient": r"^(p\d+)_"}}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Thirty patients with one to four images each, two sites."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(0)
    for patient in range(30):
        for k in range(1 + patient % 4):
            place = folder / ("oslo" if patient < 16 else "rome") / f"class{patient % 2}"
            place.mkdir(parents=True, exist_ok=True)
            noise = rng.integers(0, 60, (12, 12), np.uint8) + np.uint8(90 * (patient % 2))
            Image.fromarray(noise).save(place / f"p{patient:02}_{k}.png")
    return folder


def federation_of(folder, fold, folds=5):
    spec = DataSpec(dataset=f"folder:{folder}", image_size=8, patient=r"^(p\d+)_")
    return load(spec, whole=True).take_fold(fold, folds)


def test_every_image_is_tested_once_and_no_patient_is_parted(pictures):
    folds = [federation_of(pictures, k) for k in range(1, 6)]
    tested = np.concatenate([one.test for one in folds])
    assert sorted(tested.tolist()) == list(range(len(folds[0].labels)))
    for one in folds:
        trained = np.concatenate([client.train for client in one.clients])
        assert not set(one.patients[trained]) & set(one.patients[one.test])
        assert len(trained) + len(one.test) == len(one.labels)
        assert set(one.labels[one.test]) == {0, 1}
        assert all(len(client.test) for client in one.clients)  # each site is tested in each fold
    assert len({one.mean for one in folds}) == 5  # normalised by the images it is trained on


def test_folds_have_equal_shares_of_each_stratum():
    rng = np.random.default_rng(3)
    strata = rng.integers(0, 4, 403)
    folds = assign_folds(strata, 7, np.random.default_rng(0))
    counts = np.array([np.bincount(folds[strata == s], minlength=8)[1:] for s in range(4)])
    assert (counts.max(1) - counts.min(1)).max() <= 1
    assert np.ptp(counts.sum(0)) <= 1


def test_too_few_patients_and_clients_of_one_patient_are_told(pictures):
    with pytest.raises(FedLDError, match=r"40 folds need 40 patients, and .* has 30"):
        federation_of(pictures, 1, 40)
    images = np.zeros((12, 4, 4), np.uint8)
    lone = Federation.from_arrays(
        {"a": (images, np.arange(12) % 2), "b": (images[:1], [1])}, (images[:2], [0, 1])
    )
    with pytest.raises(FedLDError, match="leaves 'b' without training images"):
        [lone.take_fold(fold, 3) for fold in (1, 2, 3)]
    with pytest.raises(FedLDError, match="no fold 4 of 3"):
        lone.take_fold(4, 3)


def test_the_interval_is_that_of_nadeau_and_bengio():
    a, b = np.array([0.81, 0.84, 0.83, 0.80, 0.86]), np.array([0.80, 0.82, 0.80, 0.81, 0.83])
    found, plain = paired_difference(a, b, folds=5), paired_difference(a, b)
    d = a - b
    error = math.sqrt((1 / 5 + 1 / 4) * d.var(ddof=1))
    assert found.p_value == pytest.approx(2 * stats.t.sf(abs(d.mean() / error), 4))
    assert found.interval == pytest.approx(stats.t.interval(0.95, 4, d.mean(), error))
    assert plain.p_value == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert found.mean == plain.mean
    assert mean_interval(a, folds=5)[0] < mean_interval(a)[0]


def test_the_corrected_test_keeps_its_level_where_the_plain_one_does_not():
    """Two equal methods, cross-validated many times on new data: nearest mean with 1st or 2nd feature."""
    rng = np.random.default_rng(1)
    found = {"plain": 0, "corrected": 0}
    for _ in range(300):
        y = np.arange(40) % 2
        x = rng.normal(size=(40, 2)) + 0.7 * y[:, None]
        folds = assign_folds(y, 5, rng)
        scores = []
        for k in range(1, 6):
            train, test = folds != k, folds == k
            middle = (x[train & (y == 0)].mean(0) + x[train & (y == 1)].mean(0)) / 2
            scores.append(((x[test] > middle) == y[test, None]).mean(0))
        a, b = np.array(scores).T
        if (a == b).all():
            continue
        found["plain"] += paired_difference(a, b).p_value < 0.05
        found["corrected"] += paired_difference(a, b, folds=5).p_value < 0.05
    assert found["corrected"] <= 0.05 * 300
    assert found["corrected"] < found["plain"]


def test_a_study_of_folds_in_table_records_and_page(pictures, tmp_path):
    study = fedld.compare(
        ["fedavg", "fedprox"],
        f"folder:{pictures}",
        folds=3,
        image_size=8,
        jobs=0,
        out=tmp_path / "s",
        **SMALL,
    )
    assert sorted(study.results) == [(m, 0, k) for m in ("fedavg", "fedprox") for k in (1, 2, 3)]
    assert study.table[0][2] == "95 % interval"
    table = json.loads((tmp_path / "s/table.json").read_text())
    assert table["folds"] == 3
    assert "Nadeau" in table["test"]
    row = table["rows"][0]
    assert len(row["values"]["accuracy"]) == 3
    assert row["intervals"]["accuracy"] == pytest.approx(mean_interval(row["values"]["accuracy"], folds=3))
    lines = list(csv.DictReader((tmp_path / "s/table.csv").open()))
    assert {line["fold"] for line in lines if line["measure"] == "accuracy"} == {"1", "2", "3"}
    assert "every image is tested once" in (tmp_path / "s/table.md").read_text()
    assert "Nadeau" in (tmp_path / "s/table.tex").read_text()
    page = (tmp_path / "s/report.html").read_text()
    assert "3-fold cross-validation" in page
    assert "paired seed" not in page
    tested = [
        json.loads((run.path / "federation.json").read_text())["test"]
        for run in read_one(tmp_path / "s").runs
    ]
    assert sum(tested) == 2 * 73  # each image once by each method
    assert study.frame()["folds"].to_list() == [3, 3]
    victim = tmp_path / "s/runs/fedprox-seed0-fold2"
    for file in ("summary.json", "model.safetensors"):
        (victim / file).unlink()
    again = run_study(reopen(tmp_path / "s"), tmp_path / "s", resume=True, jobs=0, progress=lambda _: None)
    assert again.to_json()["rows"][1]["values"] == table["rows"][1]["values"]


def test_a_federation_of_ones_own_is_folded_too():
    rng = np.random.default_rng(0)
    clients = {
        name: (rng.integers(0, 255, (12, 8, 8), np.uint8), np.arange(12) % 2) for name in ("oslo", "rome")
    }
    study = fedld.compare(
        ["fedavg"], Federation.from_arrays(clients), folds=2, seeds=(0, 1), jobs=0, rounds=1, progress=False
    )
    assert len(study.results) == 4
    assert study.comparison.standings[0].seeds == [1, 2]  # folds, each the mean over two seeds


def test_the_command_refuses_one_fold(pictures, tmp_path):
    command = [sys.executable, "-m", "fedld", "compare", "--folds", "1", "--dataset", f"folder:{pictures}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "folds is a whole number from 2, not 1" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_tests_one_fold(pictures):
    with pytest.raises(FedLDError, match="a run tests one of the folds"):
        fedld.run("fedavg", f"folder:{pictures}", folds=3, rounds=1)
    with pytest.raises(FedLDError, match="a run tests one of the folds"):
        fedld.run("fedavg", f"folder:{pictures}", folds=3, fold=4, rounds=1)
