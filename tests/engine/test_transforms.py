"""Transforms through the engine: traffic, the same bits for any number of workers and after a stop."""

from dataclasses import dataclass

import pytest

import fedld
from fedld.engine.loop import resume, run
from fedld.errors import FedLDError, Interrupted
from fedld.transforms import PARAMETERS, UpdateTransform


def up(contents):
    return [line["bytes_up"] for line in contents["rounds.jsonl"]]


@pytest.mark.parametrize("transform", ["quantise:8", "topk:0.01"])
def test_the_records_have_the_true_traffic(small, tmp_path, contents, transform):
    run(small(rounds=1), tmp_path / "plain")
    run(small(rounds=1, transform=[transform]), tmp_path / "coded")
    share = up(contents(tmp_path / "coded"))[0] / up(contents(tmp_path / "plain"))[0]
    assert share == pytest.approx({"quantise:8": 0.25, "topk:0.01": 0.02}[transform], rel=0.03)


def test_workers_and_a_stop_change_no_bit(small, tmp_path, contents):
    settings = {"method": "scaffold", "transform": ["clip:1", "quantise:4"], "decompose": 2}
    run(small(**settings), tmp_path / "one")
    run(small(**settings, workers=2), tmp_path / "two")

    def stop(event):
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        run(small(**settings), tmp_path / "stopped", progress=stop)
    resume(tmp_path / "stopped")
    whole = contents(tmp_path / "one")
    for other in ("two", "stopped"):
        found = contents(tmp_path / other)
        assert found["rounds.jsonl"] == whole["rounds.jsonl"]
        assert found["clients.jsonl"] == whole["clients.jsonl"]


def test_what_is_lost_in_rounding_is_not_lost_for_the_model(small, tmp_path):
    """Two bits with error feedback still learn the digits."""
    plain = run(small(rounds=8, lr=0.1), tmp_path / "plain")["test"]["final"]["accuracy"]
    coarse = run(small(rounds=8, lr=0.1, transform=["quantise:2"]), tmp_path / "coarse")["test"]["final"][
        "accuracy"
    ]
    assert coarse > plain - 0.1


@dataclass(frozen=True)
class Halved(UpdateTransform):
    """Send half of every update."""

    name = "halved"

    def encode(self, message, sender):
        return {**message, PARAMETERS: message[PARAMETERS] / 2}, {}


def test_an_own_transform_is_one_class(tmp_path):
    settings = {"federation": "digits", "clients": 3, "rounds": 1, "workers": 0}
    plain = fedld.run("fedavg", out=tmp_path / "plain", **settings)
    for k, transform in enumerate((Halved(), Halved, [Halved()])):
        halved = fedld.run("fedavg", out=tmp_path / f"half{k}", transform=transform, **settings)
        norms = [one.rounds[0]["update_norm"] for one in (halved, plain)]
        assert norms[0] == pytest.approx(norms[1] / 2)


def test_a_transform_from_a_file_may_not_import_code(small):
    with pytest.raises(FedLDError, match="files may not import code: give it by hand, --transform my:Part"):
        small(transform=["my:Part"])
