"""Measured aggregation in the round loop: for any workers alike, on the record, safe when it fails."""

import json

import pytest

from fedld.engine.loop import run
from fedld.engine.worker import Worker
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
    settings = {**OPPOSED, "decompose": 1, "rule": {"name": "measured", "samples": 10_000}}
    run(small(**settings), tmp_path / "run")
    rounds = read_lines(tmp_path / "run", ROUNDS)
    for trial, line in zip(trials(tmp_path / "run"), rounds, strict=True):
        assert trial["losses"][trial["chosen"]] == pytest.approx(line["global_loss"], rel=1e-4)
        assert trial["losses"][trial["chosen"]] == min(trial["losses"]) <= trial["losses"][0]
        assert line["measuring_seconds"] > 0


def test_candidates_are_measured_on_images_that_were_set_aside(small, tmp_path, monkeypatch):
    seen, honest = [], Worker._drawn

    def watched(self, client, positions, limit, *purpose):
        seen.append((self.setup.federation.client(client), positions))
        return honest(self, client, positions, limit, *purpose)

    monkeypatch.setattr(Worker, "_drawn", watched)
    run(small(**OPPOSED, workers=0, validation=0.2), tmp_path / "run")
    assert seen
    for client, positions in seen:
        assert not set(positions) & set(client.train)
        assert list(positions) == list(client.validation)


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
    honest = Worker._drawn

    def broken(self, client, positions, limit, *purpose):
        if client == "client_2" and purpose[0] == "candidates":
            raise RuntimeError("no memory")
        return honest(self, client, positions, limit, *purpose)

    monkeypatch.setattr(Worker, "_drawn", broken)
    run(small(**OPPOSED, workers=0), tmp_path / "run")
    for trial in trials(tmp_path / "run"):
        assert list(trial["left_out"]) == ["client_2"]
        assert "no memory" in trial["left_out"]["client_2"]
        assert trial["fallback"] is None
