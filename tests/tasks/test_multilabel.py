"""Several labels per sample: the masked loss, measures against scikit-learn, whole runs, bad labels."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import fedld
from fedld.errors import FedLDError
from fedld.study.card import make_card
from fedld.tasks.classification import Multilabel, average_precision, label_auroc

NAMES = ["edema", "Pleural effusion", "mass"]


def samples(count=150):
    """Three labels; a tenth is unknown, and the first third of the samples never knows the last one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 5)).astype(np.float32)
    y = (x @ rng.normal(size=(5, 3)) + 0.3 * rng.normal(size=(count, 3)) > 0.3).astype(np.float64)
    y[rng.random(y.shape) < 0.1] = -1
    y[: count // 3, 2] = -1
    return x, y


def federation(**changes):
    x, y = samples()
    parts = {name: (x[k::3], y[k::3]) for k, name in enumerate(("a", "b", "c"))}
    return fedld.Federation.from_arrays(parts, **{"task": "multilabel", "classes": NAMES} | changes)


def test_unknown_labels_have_no_loss_and_no_gradient():
    _, y = samples()
    outputs = torch.randn(len(y), 3, dtype=torch.float64, requires_grad=True)
    task, targets = Multilabel(), torch.from_numpy(y)
    loss = task.objective(outputs, targets)
    loss.backward()
    assert (outputs.grad[targets == -1] == 0).all()
    assert (outputs.grad[targets >= 0] != 0).all()
    p = torch.sigmoid(outputs.detach()).numpy()
    expected = -np.where(y == 1, np.log(p), np.where(y == 0, np.log(1 - p), 0)).sum(1) / 3
    assert np.allclose(task.losses(outputs.detach(), targets), expected, atol=1e-12)
    assert loss.item() == pytest.approx(expected.mean(), abs=1e-12)
    sums = task.sums(outputs.detach(), targets)
    assert (sums["known"], sums["unknown"]) == ((y >= 0).sum(), (y < 0).sum())


def test_area_and_precision_are_scikit_learns_with_ties_and_unknown_labels():
    rng = np.random.default_rng(1)
    for _ in range(20):
        z, y = rng.integers(0, 6, 40).astype(float), rng.integers(-1, 2, 40).astype(float)
        known = y >= 0
        assert label_auroc(z, y) == pytest.approx(roc_auc_score(y[known], z[known]), abs=1e-12)
        assert average_precision(z, y) == pytest.approx(
            average_precision_score(y[known], z[known]), abs=1e-12
        )
    assert np.isnan(label_auroc(z, np.ones(40)))
    assert np.isnan(average_precision(z, -np.ones(40)))


def test_labels_are_learned_and_the_loss_adds_up(tmp_path):
    result = fedld.run(
        "fedavg",
        federation(),
        model="linear",
        rounds=12,
        lr=0.5,
        workers=0,
        decompose=1,
        out=tmp_path / "run",
    )
    first, last = result.rounds[0]["test"], result.rounds[-1]["test"]
    assert all(abs(line["identity_error"]) < 1e-9 for line in result.rounds)
    assert last["auroc"] > 0.8 > first["auroc"]
    assert last["loss"] < first["loss"]
    own = [last[f"auroc_{name}"] for name in ("edema_1", "pleural_effusion_2", "mass_3")]
    assert last["auroc"] == pytest.approx(np.mean(own))
    assert last["unknown"] > 0.1
    assert "label_mass" in (tmp_path / "run/predictions.csv").read_text().splitlines()[0]
    assert "AUROC of mass" in result.report(tmp_path / "page.html").read_text()
    assert "mean AUROC" in make_card(tmp_path / "run").to_markdown()


def test_methods_compare_and_those_that_need_classes_are_refused(tmp_path):
    study = fedld.compare(
        ["fedavg", "scaffold", "fedld-drift", "ditto"],
        federation(),
        model="linear",
        rounds=2,
        seeds=[0],
        jobs=0,
        rule="measured",
        out=tmp_path / "study",
    )
    assert study.table[0][1].startswith("mean AUROC")
    with pytest.raises(FedLDError, match="method 'ccvr' needs statistics of every class, and multilabel"):
        fedld.run("ccvr", federation(), model="linear", out=tmp_path / "run")


@pytest.mark.parametrize("task", ["multilabel", "regression", "survival"])
def test_npz_files_hold_targets_of_every_task(task, tmp_path):
    _, y = samples(60)
    targets = {"multilabel": y, "regression": y.sum(1), "survival": np.stack([y.sum(1) + 4, y[:, 0] > 0], 1)}
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8)
    names = {"classes": np.array(NAMES)} if task == "multilabel" else {}
    file = tmp_path / "a.npz"
    np.savez(file, images=images, labels=targets[task], site=np.array(["x", "y"] * 30), **names)
    result = fedld.run(
        "fedavg",
        f"npz:{file}",
        task=task,
        model="cnn",
        rounds=1,
        workers=0,
        decompose=1,
        out=tmp_path / "run",
    )
    assert result.rounds[-1]["test"]["loss"] > 0
    assert abs(result.rounds[-1]["identity_error"]) < 1e-9


def test_a_table_of_labels_has_unknown_cells(tmp_path):
    x, y = samples(60)
    lines = ["site,x,edema,mass"]
    for k in range(60):
        cells = ["" if value < 0 else f"{value:g}" for value in y[k, :2]]
        lines.append(",".join(["ab"[k % 2], f"{x[k, 0]:.3f}", *cells]))
    file = tmp_path / "a.csv"
    file.write_text("\n".join(lines))
    data = fedld.data(
        f"csv:{file}", task="multilabel", target_column="edema,mass", site_column="site", min_size=5
    )
    assert np.array_equal(data.labels, y[:, :2])
    file.write_text("\n".join(lines).replace("\na,", "\na,", 1).replace(",1,", ",2,", 1))
    with pytest.raises(FedLDError, match=r"label 1: a label is 1, 0 or -1 \(unknown\), not 2"):
        fedld.data(f"csv:{file}", task="multilabel", target_column="edema,mass", site_column="site")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros((6, 2)), "label '1' is never present"),
        (np.ones((6, 2)), "label '1' is never absent"),
        (np.full((6, 2), np.nan), r"row 1, label 1: a label is 1, 0 or -1 \(unknown\), not nan"),
        (np.full((6, 2), "x"), "multilabel needs numbers"),
        (np.zeros(6), "labels of shape"),
    ],
)
def test_bad_labels_are_one_sentence(values, words):
    with pytest.raises(FedLDError, match=words):
        fedld.Federation.from_arrays({"a": (np.zeros((6, 2)), values)}, task="multilabel")


def test_names_must_fit_the_labels():
    with pytest.raises(FedLDError, match="has 3 labels and 2 different names"):
        federation(classes=["edema", "mass"])
