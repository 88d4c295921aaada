"""Runs under differential privacy: what they tell, what they refuse, the same bits for any workers."""

import json

import pytest

from fedld.engine.loop import resume, run
from fedld.errors import FedLDError

DATA = {"partition": "iid", "clients": 3, "batch_size": 64}
PRIVATE = {"rounds": 2, "dp": "epsilon=8,delta=1e-5,clip=1", "client_losses": False, **DATA}


@pytest.fixture(scope="module", autouse=True)
def opacus():
    pytest.importorskip("opacus")


def test_a_run_tells_its_epsilon_and_no_loss_on_training_samples(small, tmp_path, contents):
    notes = []
    experiment = small(**PRIVATE)
    run(experiment, tmp_path / "a", progress=lambda event: notes.append(event.get("text", "")))
    told = next(note for note in notes if "epsilon" in note)
    assert "epsilon at most 7.9" in told or "epsilon at most 8 " in told
    assert "not covered" in told
    for line in (tmp_path / "a/clients.jsonl").read_text().splitlines():
        assert json.loads(line)["train_loss"] is None
    assert json.loads((tmp_path / "a/summary.json").read_text())["rounds"] == 2
    run(small(**PRIVATE, workers=2), tmp_path / "b")
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert first["clients.jsonl"] == second["clients.jsonl"]
    with pytest.raises(FedLDError, match="no further ones"):
        resume(tmp_path / "a", rounds=4)


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "feddyn", "fedadam", "fedld", "consensus"])
def test_methods_that_use_samples_in_their_steps_alone_run(small, tmp_path, method):
    run(small(**{**PRIVATE, "rounds": 1}, method=method), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": "moon"}, "beside its training"),
        ({"method": "fedpac"}, "beside its training"),
        ({"method": "central"}, "no clients that send updates"),
        ({"method": "fedlc"}, "mean over samples"),
        ({"method": "fedld-measured"}, "rule 'measured'"),
        ({"objective": "official"}, "mean over samples"),
        ({"client_losses": True}, "losses on training samples"),
        ({"decompose": 1}, "losses on training samples"),
        ({"validation": 0.2}, "losses on training samples"),
        ({"model": "resnet8"}, "BatchNorm"),
        ({"dtype": "bfloat16"}, "float32"),
        ({"dp": "epsilon=4,delta"}, "like epsilon=4"),
        ({"dp": "eps=4"}, "like epsilon=4"),
        ({"dp": "epsilon=-1"}, "dp needs epsilon"),
        ({"dp": "epsilon=nan"}, "dp needs epsilon"),
    ],
)
def test_a_run_that_would_tell_more_than_its_epsilon_says_is_refused(small, tmp_path, changes, problem):
    with pytest.raises(FedLDError, match=problem):
        run(small(**{**PRIVATE, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_frozen_batch_statistics_are_allowed(small, tmp_path):
    changes = {"model": "resnet8", "buffers": "frozen", "rounds": 1, "local_steps": 1}
    run(small(**{**PRIVATE, **changes}), tmp_path / "run")
