"""Training the last blocks of a network on the cached outputs of the frozen others."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_data_spec
from fedld.data import load
from fedld.engine.loop import run
from fedld.engine.network import divided, whole_network
from fedld.engine.setup import features_for, prepare
from fedld.errors import FedLDError
from fedld.methods import METHODS
from fedld.paths import cache_size
from fedld.records.schema import CLIENTS
from fedld.records.writer import read_lines

TINY = {
    "dataset": "fundus-sim",
    "data": {"samples": 300, "test_fraction": 0.2},
    "image_size": 8,
    "clients": 3,
    "partition": "iid",
    "rounds": 2,
    "batch_size": 20,
    "workers": 0,
    "model": "resnet8",
    "train": "head",
}


def frozen(**changes):
    return make_experiment(TINY | changes)


def features(experiment):
    folder = load(make_data_spec(experiment)).folder
    return sorted(folder.glob("features-*.npy"))


@pytest.mark.parametrize("train", ["head", "last:2"])
def test_the_cache_changes_no_bit(tmp_path, contents, train):
    for name, cached in (("cached", True), ("again", True), ("computed", False)):
        run(frozen(train=train, feature_cache=cached, decompose=1), tmp_path / name)
    assert contents(tmp_path / "cached") == contents(tmp_path / "computed")
    assert contents(tmp_path / "cached") == contents(tmp_path / "again")


def test_workers_share_the_cache_and_change_no_bit(tmp_path, contents):
    """Enough images for several processes to extract them, and a trunk of many tensors to hand over."""
    settings = {"model": "mobilenet_v2", "data": {"samples": 1100}, "rounds": 1}
    for n in (0, 2):
        run(frozen(workers=n, **settings), tmp_path / str(n))
        for file in features(frozen(**settings)):
            file.with_suffix(".json").unlink()
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


BLOCKS = [
    (name, train)
    for name in METHODS
    for train in ("head", "last:2")
    if train == "head" or not METHODS[name].second_moments  # which solve for the head alone
]


@pytest.mark.parametrize(("name", "train"), BLOCKS)
def test_every_method_trains_the_last_blocks(tmp_path, name, train):
    plain = name in ("fedma", "gamf")
    experiment = frozen(method=name, train=train, model="cnn" if plain else "resnet8", client_losses=False)
    summary = run(experiment, tmp_path / "run")
    assert summary["trained_parameters"] < summary["parameters"]
    if METHODS[name].has_global:
        before = whole_network(experiment, load(make_data_spec(experiment))).state_dict()
        after = load_file(tmp_path / "run/model.safetensors")
        assert before.keys() <= after.keys()
        moved = {key for key, value in before.items() if not torch.equal(value, after[key])}
        block = {"head": (), "last:2": ("classifier.0",) if plain else ("layer3.0",)}[train]
        head = ("classifier.2",) if plain else ("fc",)
        assert moved
        assert all(key.startswith((*block, *head)) for key in moved)


def test_only_what_is_trained_is_sent_and_kept(tmp_path):
    experiment = frozen()
    summary = run(experiment, tmp_path / "run")
    assert summary["trained_parameters"] == 65 * summary_classes(experiment)
    moments = 2 * 64  # of the head's inputs: sums in float64 before the first round, fixed numbers afterwards
    rounds = 2 * 3 * 4 * (summary["trained_parameters"] + moments)
    assert summary["bytes_up"] == rounds + 3 * 8 * (moments + 1)
    checkpoint = load_file(tmp_path / "run/checkpoints/round_00002.safetensors")
    assert checkpoint["weights"].numel() == summary["trained_parameters"] + moments


def summary_classes(experiment):
    return len(load(make_data_spec(experiment)).classes)


def test_the_saved_model_predicts_as_the_run_did(tmp_path):
    experiment = frozen(train="last:2")
    run(experiment, tmp_path / "run")
    federation = load(make_data_spec(experiment))
    model = whole_network(experiment, federation).eval()
    model.load_state_dict(load_file(tmp_path / "run/model.safetensors"))
    mean, std = (torch.tensor(part).view(1, -1, 1, 1) for part in (federation.mean, federation.std))
    images = torch.from_numpy(np.array(federation.images[federation.test])).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        right = model((images - mean) / std).argmax(1).numpy() == federation.labels[federation.test]
    last = json.loads((tmp_path / "run/rounds.jsonl").read_text().splitlines()[-1])
    assert abs(last["test"]["accuracy"] - right.mean()) <= 1 / len(right)


def test_resuming_gives_the_same_bits(tmp_path, contents):
    from fedld.engine.loop import resume

    run(frozen(rounds=3), tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop(line):
        if line["event"] == "round" and line["round"] == 1:
            raise StopError

    with pytest.raises(StopError):
        run(frozen(rounds=3), tmp_path / "cut", progress=stop)
    resume(tmp_path / "cut")
    assert contents(tmp_path / "whole") == contents(tmp_path / "cut")


def test_augmentation_runs_the_trunk_and_says_so(tmp_path):
    said, experiment = [], frozen(augment="retina", seed=71)
    summary = run(experiment, tmp_path / "run", progress=said.append)
    assert any("not cached" in line.get("text", "") for line in said)
    assert features(experiment) == []
    assert summary["trained_parameters"] < summary["parameters"]


@pytest.mark.parametrize("damage", ["torn", "flipped", "version", "facts", "gone"])
def test_a_damaged_cache_is_computed_again(tmp_path, contents, damage):
    experiment, said = frozen(data={"samples": 290}), []
    run(experiment, tmp_path / "first")
    file = features(experiment)[0]
    facts, whole = file.with_suffix(".json"), file.read_bytes()
    match damage:
        case "torn":
            file.write_bytes(whole[: len(whole) // 2])
        case "flipped":
            file.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
        case "version":
            facts.write_text(json.dumps(json.loads(facts.read_text()) | {"format": 0}))
        case "facts":
            facts.write_text("[1")
        case "gone":
            file.unlink()
    run(experiment, tmp_path / "second", progress=said.append)
    assert [line for line in said if "damaged" in line.get("text", "")]
    assert file.read_bytes() == whole
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_other_weights_and_other_normalisation_have_caches_of_their_own(tmp_path):
    settings = {"data": {"samples": 280}, "data_seed": 5}
    for k, changes in enumerate([{}, {"seed": 1}, {"train": "last:2"}, {"normalisation": "imagenet"}]):
        prepare(frozen(**settings, **changes), tmp_path)
        assert len(features(frozen(**settings))) == k + 1
    prepare(frozen(**settings, method="scaffold", lr=0.5), tmp_path)
    assert len(features(frozen(**settings))) == 4


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, contents):
    run(frozen(data={"samples": 310}), tmp_path / "cached")
    said = []
    for file in features(frozen(data={"samples": 310})):
        file.with_suffix(".json").unlink()
    usage = type("Usage", (), {"free": 0})
    monkeypatch.setattr("fedld.engine.features.shutil.disk_usage", lambda _: usage)
    run(frozen(data={"samples": 310}), tmp_path / "computed", progress=said.append)
    assert any("computed for every batch" in line.get("text", "") for line in said)
    assert contents(tmp_path / "cached") == contents(tmp_path / "computed")


def test_features_are_taken_as_they_are_where_they_are_not_standardised(tmp_path):
    for standardise in (True, False):
        run(frozen(train="head", rounds=1, standardise=standardise), tmp_path / str(standardise))
        model = load_file(tmp_path / str(standardise) / "model.safetensors")
        (shift,) = (value for name, value in model.items() if name.endswith(".shift"))
        assert bool(shift.any()) == standardise


def test_a_sites_quota_counts_the_features(tmp_path):
    experiment, said = frozen(data={"samples": 312}), []
    setup, _ = prepare(experiment.model_copy(update={"feature_cache": False}), tmp_path)
    setup = replace(setup, experiment=experiment)
    trunk, _ = divided(experiment, setup.method, setup.federation)
    assert features_for(setup, trunk, said.append, quota=cache_size() + 100) is None
    assert "GiB are too many" in said[0]
    assert not features(experiment)
    assert features_for(setup, trunk, said.append, quota=cache_size() + 1e9).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": "last:99"}, "5 blocks"),
        ({"train": "layer7"}, "did you mean"),
        ({"head": "mlp:none"}, "mlp:64"),
        ({"normalisation": "imagnet"}, "normalisation"),
        ({"method": "fedma"}, "plain stacks"),
    ],
)
def test_bad_settings_are_a_sentence_before_anything_is_written(tmp_path, changes, words):
    with pytest.raises(FedLDError, match=words):
        run(frozen(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_and_rates_of_every_round_are_on_record(tmp_path):
    settings = {"local_steps": 3, "lr": 0.1, "lr_schedule": "step", "lr_step": 1, "lr_decay": 0.5}
    run(frozen(**settings), tmp_path / "run")
    lines = read_lines(tmp_path / "run", CLIENTS)
    assert [(line["round"], line["steps"], line["lr"]) for line in lines] == [(1, 3, 0.1)] * 3 + [
        (2, 3, 0.05)
    ] * 3
