"""The example's own parts: as values, by import path, in worker processes; the same bits."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import fedld
from fedld import Federation, FedLDError
from fedld.records.schema import ROUNDS
from fedld.records.writer import read_lines
from fedld.tasks import as_metric

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {"rounds": 2, "lr": 0.2, "batch_size": 40, "workers": 0}


@pytest.fixture
def parts(monkeypatch):
    """The example as a module that worker processes can import."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import own_parts

    yield own_parts
    sys.modules.pop("own_parts")


@pytest.fixture
def given(parts):
    return {"model": parts.Net, "objective": parts.smoothed, "metrics": [parts.top2, "kappa"], **SETTINGS}


def test_values_go_in_and_a_result_comes_out(parts, given, tmp_path):
    result = fedld.run(parts.Careful(part=0.5), parts.sites(), decompose=1, out=tmp_path / "run", **given)
    assert [line["round"] for line in result.rounds] == [1, 2]
    assert {line["client"] for line in result.clients} == {"paris", "lyon", "nice"}
    assert {"top2", "kappa"} <= set(result.rounds[-1]["test"])
    last = result.decomposition[-1]
    assert last["local"] + last["shift"] + last["aggregation"] == pytest.approx(last["global"])
    images, labels = parts.hospital(4, 0.0)
    hits = result.model(torch.from_numpy(images).float()).argmax(1).numpy() == labels
    assert hits.mean() == pytest.approx(result.summary["test"]["final"]["accuracy"])
    assert repr(result).startswith("<fedld.Result Careful on hospitals: 2 rounds")
    assert "data:image/png" in result._repr_html_()
    assert result.diagnosis.verdict
    assert "Careful" in result.report(tmp_path / "page.html").read_text()
    saved = (tmp_path / "run/config.toml").read_text()
    assert 'name = "own_parts:Careful"' in saved
    assert 'model = "own_parts:Net"' in saved


def test_a_folder_of_its_own_goes_with_the_result(parts, given):
    result = fedld.run("fedavg", parts.sites(), **given)
    path = result.path
    assert (path / "config.toml").exists()
    del result
    assert not path.exists()


def test_import_paths_with_two_workers_give_the_same_bits(parts, given, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    here = fedld.run(parts.Careful(part=0.5), parts.sites(), out=tmp_path / "values", **given)
    asked = ["--method", "own_parts:Careful", "--set", "method.part=0.5", "--dataset", "own_parts:sites"]
    asked += ["--model", "own_parts:Net", "--objective", "own_parts:smoothed", "--metric", "own_parts:top2"]
    asked += ["--metric", "kappa", "--rounds", "2", "--lr", "0.2", "--batch-size", "40", "--workers", "2"]
    answer = CliRunner().invoke(cli(), ["run", *asked, "--out", str(tmp_path / "paths")])
    assert answer.exit_code == 0, answer.output or answer.exception
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("values", "paths"))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    again = read_lines(tmp_path / "paths", ROUNDS)
    assert [line["test"] for line in again] == [line["test"] for line in here.rounds]


def cli():
    from fedld.cli import app

    return app


def test_a_stopped_run_goes_on_with_the_same_values(parts, given, tmp_path):
    whole = fedld.run(parts.Careful, parts.sites(), out=tmp_path / "whole", **given)

    class CrashError(Exception):
        pass

    def crash(line, model):
        raise CrashError

    with pytest.raises(CrashError):
        fedld.run(parts.Careful, parts.sites(), out=tmp_path / "part", callbacks=[crash], **given)
    answer = CliRunner().invoke(cli(), ["run", "--resume", str(tmp_path / "part")])
    assert "files may not import code" in str(answer.exception)
    again = fedld.run(parts.Careful, parts.sites(), out=tmp_path / "part", resume=True, **given)
    assert again.summary["test"]["final"]["loss"] == whole.summary["test"]["final"]["loss"]
    with pytest.raises(FedLDError, match="other settings"):
        fedld.run(parts.Careful(part=0.1), parts.sites(), out=tmp_path / "part", resume=True, **given)


def test_a_callback_sees_record_and_model_and_may_end_the_run(parts, given):
    seen = []

    def stop(line, model):
        seen.append((line["round"], model(torch.zeros(1, 8)).shape))
        return line["round"] == 1

    result = fedld.run("fedavg", parts.sites(), callbacks=[stop], **given)
    assert seen == [(1, (1, 3))]
    assert result.summary["rounds"] == 1


def test_a_study_of_values_and_names(parts, given, tmp_path):
    methods = {"plain": "fedavg", "half": parts.Careful(part=0.5), "prox": {"name": "fedprox", "mu": 0.1}}
    study = fedld.compare(methods, parts.sites(), seeds=range(2), out=tmp_path / "study", jobs=0, **given)
    assert [row[0] for row in study.table] == ["method", "plain", "half", "prox"]
    assert study.verdict in repr(study)
    assert set(study.results) == {(label, seed) for label in methods for seed in (0, 1)}
    assert study.results["half", 1].summary["seed"] == 1
    shown = study._repr_html_()
    assert "<table>" in shown
    assert "data:image/png" in shown
    assert (tmp_path / "study/report.html").exists()
    assert study.report(tmp_path / "page.html").exists()


def brier(logits, labels):
    """Squared error of the probabilities, by sample."""
    wanted = nn.functional.one_hot(labels, logits.shape[1])
    return (logits.softmax(1) - wanted).square().sum(1)


def hit(logits, labels):
    return (logits.argmax(1) == labels).float()


def test_an_own_metric_decides_a_study(parts, given, tmp_path):
    """It is in the table, the verdict, the page and the CSV; where less is better, the smaller one leads."""
    each = as_metric(brier)
    given["metrics"] = {
        "top2": parts.top2,
        "error": fedld.Metric(sums=each.sums, value=each.value, better="less"),
    }
    study = fedld.compare(
        ["fedavg", parts.Careful(part=0.0)],
        parts.sites(),
        seeds=[0],
        primary="error",
        out=tmp_path / "study",
        jobs=0,
        **given,
    )
    head, fedavg, _ = study.table
    assert head[1] == "error"
    assert "top2" in head
    value = study.results["fedavg", 0].rounds[-1]["test"]["error"]
    assert study.results["fedavg", 0].summary["test"]["final"]["error"] == value
    assert fedavg[1] == f"{value:.4f}"
    both = [study.results[key].rounds[-1]["test"]["error"] for key in study.results]
    assert study.comparison.winner.values["error"][0] == min(both)  # not the method that learns nothing
    assert "of error" in study.verdict
    assert study.comparison.to_json()["rows"][0]["values"]["error"] == [value]
    assert f"fedavg,0,error,{value}" in (tmp_path / "study/table.csv").read_text()
    assert "top2" in study.report(tmp_path / "page.html").read_text()
    answer = CliRunner().invoke(
        cli(), ["report", str(tmp_path / "study"), "--primary", "top2", "-o", str(tmp_path / "p.html")]
    )
    assert answer.exit_code == 0, answer.exception


def test_an_own_metric_is_known_at_every_client_with_test_images():
    line = fedld.run("fedavg", "digits", clients=3, hold_out=0.2, rounds=1, workers=0, metrics=[hit]).rounds[
        -1
    ]
    for scores in (line["test"], *line["client_tests"].values()):
        assert scores["hit"] == pytest.approx(scores["accuracy"])


def test_a_metric_that_is_no_measure_of_a_study_is_refused_before_anything_is_written(parts, given, tmp_path):
    def accuracy(logits, labels):
        return hit(logits, labels)

    with pytest.raises(FedLDError, match="accuracy' is measured in every run"):
        fedld.run("fedavg", parts.sites(), out=tmp_path / "run", **given | {"metrics": [accuracy]})
    with pytest.raises(FedLDError, match="unknown primary measure 'top3': did you mean 'top2'"):
        fedld.compare(["fedavg"], parts.sites(), primary="top3", out=tmp_path / "study", **given)
    assert list(tmp_path.iterdir()) == []


def test_a_built_in_method_by_value_is_saved_by_name(tmp_path):
    from fedld.methods import METHODS, FedProx

    small = fedld.data("digits", clients=3)
    fedld.run(FedProx(mu=0.3), small, rounds=1, workers=0, out=tmp_path / "run")
    answer = CliRunner().invoke(cli(), ["run", "--resume", str(tmp_path / "run")])
    assert answer.exit_code == 0  # it is finished; nothing of it is anybody's own
    saved = (tmp_path / "run/config.toml").read_text()
    assert 'name = "fedprox"' in saved
    assert "mu = 0.3" in saved
    assert "data_seed = 0" in saved
    assert METHODS["fedprox"].mu != 0.3


def test_what_workers_cannot_import_stays_here_and_says_so(parts, given):
    def closure(logits, labels):
        return parts.smoothed(logits, labels)

    given |= {"objective": closure, "workers": 2}
    with pytest.warns(UserWarning, match="closure' cannot be sent to worker processes"):
        fedld.run("fedavg", parts.sites(), **given)
    given |= {"objective": parts.smoothed, "metrics": {"mine": lambda logits, labels: labels == 0}}
    with pytest.warns(UserWarning, match="metrics 'mine' cannot be sent to worker processes"):
        fedld.run("fedavg", parts.sites(), **given)


class Pairs:
    """A map-style dataset."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, place):
        return self.items[place]


def test_datasets_are_read_as_arrays_are(parts):
    sites = {name: parts.hospital(seed, 0.0) for seed, name in enumerate(["a", "b"])}

    def pairs(site):
        return Pairs([(torch.from_numpy(x), int(y)) for x, y in zip(*site, strict=True)])

    arrays, datasets = (
        Federation.from_arrays(sites),
        Federation.from_datasets({name: pairs(site) for name, site in sites.items()}),
    )
    assert np.array_equal(arrays.images, datasets.images)
    assert arrays.fingerprint() == datasets.fingerprint()


def test_pictures_are_normalised_and_words_are_labels():
    rng = np.random.default_rng(0)
    words = np.array(["ill", "well"] * 10)
    pictures = {name: (rng.integers(0, 255, (20, 9, 9), np.uint8), words) for name in "ab"}
    federation = Federation.from_arrays(pictures)
    assert federation.classes == ("ill", "well")
    assert federation.input_shape == (1, 9, 9)
    assert 0.4 < federation.mean[0] < 0.6
    assert len(federation.test) == 8
    assert sum(len(client.train) for client in federation.clients) == 32


X, Y = np.zeros((4, 8), np.float32), np.array([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"method": 3}, "method is a name, or a Method, not int 3"),
        ({"model": 3}, "model is a name, a torch module, or a function"),
        ({"model": nn.Linear(8, 5)}, r"gives \(2, 5\) for two samples, but 3 classes need \(2, 3\)"),
        ({"model": nn.Linear(4, 3)}, "cannot take samples of shape"),
        ({"model": lambda depth: nn.Linear(8, depth)}, "needs an argument 'depth'; available arguments are"),
        ({"model": lambda: 3}, "made a int, not a torch module"),
        ({"model": "cnn"}, "is for pictures, but a sample has shape"),
        ({"rule": object()}, "rule is a name, or a Rule"),
        ({"objective": lambda logits: logits}, r"an objective takes \(logits, labels\)"),
        ({"objective": lambda logits, labels: 1.0}, "must give one number that depends on the logits"),
        ({"metrics": [lambda logits, labels: logits]}, "one value per sample is needed"),
        ({"metrics": ["f1"]}, "unknown metric 'f1': valid names: kappa, macro-f1"),
        ({"model": "own_nets:Net"}, "files may not import code"),
        ({"metrics": [3]}, "a metric is a fedld.Metric or a function"),
        ({"callbacks": [3]}, "a callback is a function"),
        ({"roundz": 3}, "did you mean 'rounds'"),
    ],
)
def test_a_wrong_part_is_one_sentence_before_anything_is_written(parts, given, tmp_path, change, problem):
    with pytest.raises(FedLDError, match=problem):
        fedld.run(change.pop("method", "fedavg"), parts.sites(), out=tmp_path / "run", **(given | change))
    assert not (tmp_path / "run/config.toml").exists()


@pytest.mark.parametrize(
    ("clients", "problem"),
    [
        ({}, "at least one client"),
        ([(X, Y)], "clients are given by name"),
        ({"": (X, Y)}, "a client's name is a word, not ''"),
        ({3: (X, Y)}, "a client's name is a word, not 3"),
        ({"a": X}, "client 'a' is not a"),
        ({"a": (X, Y[:2])}, "client 'a' has 4 samples and labels of shape"),
        ({"a": (X[:0], Y[:0])}, "client 'a' has no samples"),
        ({"a": (X, Y), "b": (X[:, :2], Y)}, "the samples of 'b' are float32"),
        ({"a": (X, Y - 1)}, "labels are whole numbers from 0 or words"),
        ({"a": (X * np.nan, Y)}, "samples that are not finite"),
        ({"a": (np.array(["x"] * 4), Y)}, "numbers"),
    ],
)
def test_wrong_arrays_are_one_sentence(clients, problem):
    with pytest.raises(FedLDError, match=problem):
        Federation.from_arrays(clients, test=(X, Y))


def test_a_dataset_of_other_things_than_pairs_is_one_sentence():
    with pytest.raises(FedLDError, match="item 1 of the dataset of 'a' is not a"):
        Federation.from_datasets({"a": Pairs([(X[0], 1), X[0]])})
    with pytest.raises(FedLDError, match="is no dataset: it has neither a length and items, nor can it be"):
        Federation.from_datasets({"a": 3})


def test_a_name_that_is_wrong_leaves_no_study_behind(tmp_path):
    answer = CliRunner().invoke(cli(), ["compare", "--model", "resnet9", "--out", str(tmp_path / "study")])
    assert "did you mean 'resnet8'" in str(answer.exception)
    answer = CliRunner().invoke(cli(), ["compare", "--partition", "iidd", "--out", str(tmp_path / "study")])
    assert "did you mean 'iid'" in str(answer.exception)
    assert not (tmp_path / "study").exists()


def test_a_file_may_not_import_code(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    (tmp_path / "x.toml").write_text('model = "evil:net"\n')
    answer = CliRunner().invoke(cli(), ["run", "--config", str(tmp_path / "x.toml")])
    assert "model 'evil:net' comes from a file, which may not import code" in str(answer.exception)


def test_a_partition_of_ones_own():
    def halves(labels, clients):
        return np.array_split(np.arange(len(labels)), clients)

    federation = fedld.data("digits", clients=4, partition=halves)
    sizes = [len(client.train) for client in federation.clients]
    assert max(sizes) - min(sizes) <= 1
    for found in ([1.5], 3, [], [[0.5]]):
        with pytest.raises(
            FedLDError, match="gives no client an image" if found == [] else "one array of places"
        ):
            fedld.data("digits", partition=lambda labels, found=found: found)
    with pytest.raises(FedLDError, match="gives a place twice"):
        fedld.data("digits", partition=lambda labels: [[0, 1], [1, 2]])


def test_a_federation_is_used_and_not_loaded_again(monkeypatch, tmp_path):
    from fedld.config import resolve

    federation = fedld.data("digits", clients=3)
    loads = []
    real = resolve.load
    monkeypatch.setattr(resolve, "load", lambda spec, **options: loads.append(spec) or real(spec, **options))
    fedld.run("fedavg", federation, rounds=1, workers=0, out=tmp_path / "run")
    fedld.compare(["fedavg"], federation, seeds=[0], rounds=1, jobs=0, out=tmp_path / "study")
    assert loads == []
    other = fedld.run("fedavg", federation, rounds=1, workers=0, clients=4, out=tmp_path / "other")
    assert other.summary["clients"] == 4
    assert len(loads) == 1
