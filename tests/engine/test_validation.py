"""The best model is chosen by images that clients set aside; sites' own results carry intervals."""

import json

import numpy as np
import pytest
import torch

from fedld.analysis.sites import site_result
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_federation
from fedld.engine.loop import resume, run
from fedld.engine.network import load_model
from fedld.errors import FedLDError, Interrupted
from fedld.models.files import read_model
from fedld.records.reader import read_run
from fedld.records.schema import ROUNDS
from fedld.records.tables import read_predictions
from fedld.records.writer import read_lines
from fedld.study.card import make_card
from fedld.study.report.tables import sites_table


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sites with test pictures, three pictures per patient; a network that learns them soon overfits."""
    rng, file = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "sites.npz"
    labels = np.arange(240) // 3 % 2
    images = rng.integers(0, 200, (240, 8, 8), dtype=np.uint8) + (30 * labels[:, None, None]).astype(np.uint8)
    arrays = {
        "images": images,
        "labels": labels,
        "site": np.where(np.arange(240) < 120, "east", "west"),
        "patient": np.array([f"p{k // 3}" for k in range(240)]),
        "split": np.where(np.arange(240) // 3 % 10 < 6, "train", "test"),
        "classes": np.array(["healthy", "sick"]),
    }
    np.savez(file, **arrays)
    return file


def settings(data, **changes):
    common = {"rounds": 4, "workers": 0, "lr": 0.2, "validation": 0.25}
    return make_experiment(common | {"dataset": f"npz:{data}"} | changes)


def best(out):
    best = read_model(out / "best.safetensors")
    return best.metadata, best.tensors


def assert_same_best(one, other):
    assert (one / "best.safetensors").read_bytes() == (other / "best.safetensors").read_bytes()


def test_the_best_model_is_that_of_the_least_validation_loss(data, tmp_path):
    experiment = settings(data)
    summary = run(experiment, tmp_path / "run")
    losses = {line["round"]: line["validation"]["loss"] for line in read_lines(tmp_path / "run", ROUNDS)}
    chosen = min(losses, key=losses.__getitem__)
    assert summary["validated"]["round"] == chosen == int(best(tmp_path / "run")[0]["round"])
    line = next(line for line in read_lines(tmp_path / "run", ROUNDS) if line["round"] == chosen)
    assert summary["validated"]["test"]["accuracy"] == line["test"]["accuracy"]
    federation = make_federation(experiment)
    rows = np.concatenate([client.validation for client in federation.clients])
    assert line["validation"]["count"] == len(rows)
    told = load_model(tmp_path / "run/best.safetensors").probabilities(np.array(federation.images[rows]))
    loss = -np.log(told[np.arange(len(rows)), federation.labels[rows]]).mean()
    assert loss == pytest.approx(losses[chosen], abs=1e-5)


def test_validation_images_are_nobodys_training_or_test_images(data):
    before, federation = make_federation(settings(data, validation=None)), make_federation(settings(data))
    patients = federation.patients
    for old, client in zip(before.clients, federation.clients, strict=True):
        assert np.array_equal(np.union1d(client.train, client.validation), old.train)
        assert np.array_equal(client.test, old.test)
        assert 0 < len(client.validation) < len(client.train)
        assert not set(patients[client.validation]) & set(patients[client.train])
    assert before.fingerprint() != federation.fingerprint()


def test_the_choice_never_sees_the_test_images(data, tmp_path):
    with np.load(data) as found:
        arrays = dict(found)
    test = arrays["split"] == "test"
    arrays["labels"][test] = 1 - arrays["labels"][test]
    np.savez(tmp_path / "turned.npz", **arrays)
    accuracies = [
        run(settings(file), tmp_path / name)["test"]["final"]["accuracy"]
        for name, file in (("a", data), ("b", tmp_path / "turned.npz"))
    ]
    assert accuracies[0] == pytest.approx(1 - accuracies[1])
    assert_same_best(tmp_path / "a", tmp_path / "b")


def test_a_resumed_run_keeps_the_same_best_model(data, tmp_path):
    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    run(settings(data), tmp_path / "whole")
    with pytest.raises(Interrupted):
        run(settings(data), tmp_path / "cut", progress=stop)
    resume(tmp_path / "cut")
    assert_same_best(tmp_path / "whole", tmp_path / "cut")


def test_a_method_without_a_global_model_has_no_best_one(data, tmp_path):
    with pytest.raises(FedLDError, match="validation chooses among global models, and method 'local'"):
        run(settings(data, method="local"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_site_has_its_own_results_with_intervals(data, tmp_path):
    experiment = settings(data, method="fedbn", model="resnet8", rounds=1, validation=None, specificity=0.75)
    summary = run(experiment, tmp_path / "run")
    table = read_predictions(tmp_path / "run/predictions.csv")
    labels = np.array([table.classes.index(label) for label in table.columns["label"]])
    for name in ("east", "west"):
        mine = np.array(table.columns["site"]) == name
        told = site_result(
            table.probabilities[mine],
            table.probabilities[mine].argmax(1) == labels[mine],
            labels[mine],
            1,
            0.75,
            np.array(table.columns["patient"])[mine],
        ).to_json()
        found = summary["sites"][name]["global"]
        assert (found["pictures"], found["patients"]) == (48, 16)
        for key in ("accuracy", "auroc", "sensitivity"):
            assert found[key] == pytest.approx(told[key], abs=1e-6), key
    own = [summary["sites"][name]["personal"]["accuracy"]["value"] for name in ("east", "west")]
    last = read_lines(tmp_path / "run", ROUNDS)[-1]
    assert np.mean(own) == pytest.approx(last["personal_own"]["accuracy"])
    text = make_card(tmp_path / "run").to_markdown()
    assert "## Results on each site's own test pictures" in text
    assert "sensitivity for sick at specificity 0.75" in text
    assert text.count("| east | personal | 48 |") == 1
    assert text.count("| east | global |") == 0  # it is in the first table
    rows = sites_table([read_run(tmp_path / "run")]).rows
    assert [[cell.text for cell in row[2:5]] for row in rows][:2] == [
        ["east", "global", "48"],
        ["east", "personal", "48"],
    ]


def test_results_of_a_diverged_model_are_unknown_but_for_the_accuracy():
    told = site_result(torch.full((4, 2), torch.nan), np.zeros(4, bool), np.array([0, 1, 0, 1]), 1).to_json()
    assert json.loads(json.dumps(told))["auroc"] == {"value": None, "low": None, "high": None}
    assert told["accuracy"]["value"] == 0


def test_a_lost_best_model_is_named_and_never_replaced_by_a_worse_one(data, tmp_path):
    """The last round's model took its place, under the name of the best."""
    summary = run(settings(data, lr=0.5), tmp_path / "run")
    assert summary["validated"]["round"] < 4
    (tmp_path / "run/best.safetensors").unlink()
    with pytest.raises(FedLDError, match=r"best.safetensors' is missing, and the model of round . cannot be"):
        resume(tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    resume(tmp_path / "run")
    assert not (tmp_path / "run/best.safetensors").exists()
