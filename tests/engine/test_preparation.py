"""The exchange before training: counted, the same for any number of workers, and failures in it."""

import pytest

from fedld.engine.loop import run
from fedld.errors import FedLDError
from fedld.methods.fediir import FedIIR
from fedld.records.reader import read_run

SETTINGS = {"method": "fediir", "clients": 3, "rounds": 2, "image_size": 8}


def test_it_is_counted_in_the_traffic(small, tmp_path):
    """One more model and message down, one more head gradient up, per client and round."""
    here, lagged = (
        run(small(**SETTINGS | {"method": {"name": "fediir", "lagged": lagged}}), tmp_path / str(lagged))
        for lagged in (False, True)
    )
    head = 4 * (10 * 128 + 10)
    assert here["bytes_up"] == lagged["bytes_up"], "the gradient goes up before or after, but once"
    model = 4 * here["parameters"]
    rounds = [read_run(tmp_path / str(lagged)).rounds.lines for lagged in (False, True)]
    assert [line["bytes_down"] for line in rounds[0]] == [3 * (2 * model + head), 3 * (2 * model + 2 * head)]
    assert [line["bytes_down"] for line in rounds[1]] == [3 * model, 3 * (model + head)]


@pytest.mark.parametrize("method", ["fediir", "fedlin"])
def test_a_closed_start_is_no_preparation_of_the_method(small, tmp_path, method):
    settings = {"method": method, "start": "closed", "train": "head", "rounds": 1}
    assert run(small(**SETTINGS | settings), tmp_path / "run")["rounds"] == 1


def test_the_bits_do_not_depend_on_the_number_of_workers(small, contents, tmp_path):
    for workers in (0, 2):
        run(small(**SETTINGS, workers=workers), tmp_path / str(workers))
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


@pytest.mark.parametrize("how", ["raises", "sends NaN"])
def test_a_client_that_fails_before_training_is_left_out_of_the_round(small, tmp_path, monkeypatch, how):
    honest = FedIIR.prepare

    def prepare(method, client):
        if client.name == "client_2" and how == "raises":
            raise ValueError("no gradient today")
        message = honest(method, client)
        return {"gradient": message["gradient"] * float("nan")} if client.name == "client_2" else message

    monkeypatch.setattr(FedIIR, "prepare", prepare)
    run(small(**SETTINGS, on_client_failure="skip"), tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert [line["clients"] for line in found.rounds.lines] == [2, 2]
    reasons = {line["client"]: line.get("excluded") for line in found.clients.lines}
    assert reasons["client_1"] is None
    assert {"raises": "no gradient today", "sends NaN": "not finite"}[how] in reasons["client_2"]
    if how == "raises":
        with pytest.raises(FedLDError, match="'client_2' failed in round 1: ValueError: no gradient today"):
            run(small(**SETTINGS), tmp_path / "stopped")
