"""Measured aggregation in the round loop: for any workers alike, on the record, safe when it fails."""

import json

import numpy as np
import pytest

from fedld.config.experiment import make_experiment
from fedld.engine.client_data import Draws
from fedld.engine.loop import run
from fedld.engine.setup import prepare
from fedld.local import Samples
from fedld.records.schema import CONFLICT, ROUNDS
from fedld.records.writer import read_lines

OPPOSED = {"partition": "dirichlet", "alpha": 0.1, "rounds": 2, "method": "fedld-drift", "model": "resnet8"}


def trials(path):
    return [line["trial"] for line in read_lines(path, CONFLICT)]


def test_any_number_of_workers_measures_the_same(small, contents, tmp_path):
    for workers in (0, 2):
        run(small(**OPPOSED, workers=workers), tmp_path / str(workers))
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_the_measured_loss_is_the_loss_the_clients_then_find(small, tmp_path):
    """With all images as samples, the loss of the candidate taken is the global loss of the next model."""
    settings = {**OPPOSED, "decompose": 1, "rule": {"name": "measured", "samples": 10_000, "unseen": 0}}
    run(small(**settings), tmp_path / "run")
    rounds = read_lines(tmp_path / "run", ROUNDS)
    for trial, line in zip(trials(tmp_path / "run"), rounds, strict=True):
        assert trial["losses"][trial["chosen"]] == pytest.approx(line["global_loss"], rel=1e-4)
        assert trial["losses"][trial["chosen"]] == min(trial["losses"]) <= trial["losses"][0]
        assert line["measuring_seconds"] > 0


def draws(experiment, tmp_path):
    setup, _ = prepare(experiment, tmp_path / "states")
    return Draws(setup, experiment.seed), setup.federation


def test_half_of_the_images_that_a_client_measures_sat_the_round_out(small, tmp_path):
    drawn, federation = draws(small(**OPPOSED), tmp_path)
    for client in federation.clients:
        rounds = [set(client.train) - set(drawn.training_images(client.name, round_)) for round_ in (1, 2)]
        assert rounds[0] != rounds[1]
        for round_, out in enumerate(rounds, 1):
            measured = drawn.candidates(client.name, round_, limit=64)
            assert len(set(measured)) == len(measured) == 2 * len(out)
            assert out < set(measured) <= set(client.train)
            labels = federation.labels[client.train]
            share = min(0.2, 32 / len(client.train))
            counts = np.bincount(federation.labels[list(out)], minlength=10)
            assert counts.sum() == int(share * len(client.train) + 1e-9)
            assert (abs(counts - share * np.bincount(labels, minlength=10)) < 2).all()


def test_no_image_that_sits_out_is_trained_on(small, tmp_path, monkeypatch):
    experiment, seen, honest = small(**OPPOSED, workers=0), [], Samples.shuffled

    def watched(self, size, generator):
        seen.append(self._positions)
        return honest(self, size, generator)

    monkeypatch.setattr(Samples, "shuffled", watched)
    run(experiment, tmp_path / "run")
    drawn, federation = draws(experiment, tmp_path)
    wanted = [
        drawn.training_images(client.name, round_) for round_ in (1, 2) for client in federation.clients
    ]
    assert len(seen) == len(wanted)
    assert {tuple(trained) for trained in seen} == {tuple(trained) for trained in wanted}


@pytest.mark.parametrize("changes", [{"rule": "mean"}, {"rule": {"name": "measured", "unseen": 0}}])
def test_nobody_sits_out_unless_it_is_measured(small, tmp_path, changes):
    drawn, federation = draws(small(**OPPOSED | changes), tmp_path)
    for client in federation.clients:
        assert drawn.training_images(client.name, 1).tolist() == client.train.tolist()
        assert len(drawn.candidates(client.name, 1, limit=20)) == 20


def test_whole_patients_sit_out(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "eyes.npz"
    patient = np.repeat([f"p{k}" for k in range(60)], 4)
    columns = {"patient": patient, "split": np.where(np.arange(240) < 200, "train", "test")}
    images, labels = rng.integers(0, 255, (240, 8, 8, 1), np.uint8), np.repeat(rng.integers(0, 2, 60), 4)
    np.savez(path, images=images, labels=labels, site=np.resize(["a", "b"], 240), **columns)
    experiment = make_experiment({"dataset": f"npz:{path}", "partition": "site", "method": "measured"})
    drawn, federation = draws(experiment, tmp_path)
    for client in federation.clients:
        trained = drawn.training_images(client.name, 1)
        assert 0 < len(trained) < len(client.train)
        assert not set(patient[trained]) & set(patient[np.setdiff1d(client.train, trained)])


def test_a_client_with_hardly_an_image_trains_on_all_of_them(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "few.npz"
    site = np.array(["many"] * 40 + ["few"] * 3 + ["one"])
    arrays = {"images": rng.integers(0, 255, (44, 8, 8, 1), np.uint8), "labels": np.arange(44) % 2}
    np.savez(path, **arrays, site=site, split=np.resize(["train"] * 43 + ["test"], 44))
    settings = {"dataset": f"npz:{path}", "partition": "site", "method": "measured", "min_size": 1}
    drawn, federation = draws(make_experiment(settings), tmp_path)
    for client in federation.clients:
        trained = drawn.training_images(client.name, 1)
        assert (len(trained) < len(client.train)) == (client.name == "many")
        assert len(drawn.candidates(client.name, 1, limit=64))


def test_candidates_are_measured_on_images_that_were_set_aside(small, tmp_path):
    drawn, federation = draws(small(**OPPOSED, validation=0.2), tmp_path)
    for client in federation.clients:
        assert drawn.training_images(client.name, 1).tolist() == client.train.tolist()
        assert drawn.candidates(client.name, 1, limit=10_000).tolist() == client.validation.tolist()
        assert set(drawn.candidates(client.name, 1, limit=10)) < set(client.validation)


def test_directions_travel_once_and_one_number_per_candidate_comes_back(small, tmp_path):
    for rule in ("mean", "measured"):
        run(small(**OPPOSED | {"method": "fedavg", "rule": rule, "rounds": 1}), tmp_path / rule)
    plain, measured = (
        json.loads((tmp_path / r / "rounds.jsonl").read_text().splitlines()[0]) for r in ("mean", "measured")
    )
    model = plain["bytes_down"]  # four clients, one model each
    assert 1.9 * model < measured["bytes_down"] - plain["bytes_down"] <= 2 * model
    assert measured["bytes_up"] - plain["bytes_up"] == 4 * 16 * 5


def test_a_client_that_cannot_measure_is_left_out_and_named(small, tmp_path, monkeypatch):
    honest = Draws.candidates

    def broken(self, client, round_, limit):
        if client == "client_2":
            raise RuntimeError("no memory")
        return honest(self, client, round_, limit)

    monkeypatch.setattr(Draws, "candidates", broken)
    run(small(**OPPOSED, workers=0), tmp_path / "run")
    for trial in trials(tmp_path / "run"):
        assert list(trial["left_out"]) == ["client_2"]
        assert "no memory" in trial["left_out"]["client_2"]
        assert trial["fallback"] is None
