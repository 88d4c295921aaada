"""A closed start: the head begins where `ridge` ends, for every method and network with a linear head."""

import pytest
import torch
from safetensors.torch import load_file

from fedld.engine.loop import run, start_closed
from fedld.errors import FedLDError
from fedld.methods.fedpac import FedPAC
from fedld.records.reader import read_run

HEAD = {"clients": 3, "rounds": 1, "image_size": 8, "train": "head"}
STILL = {"start": "closed", "lr": 1e-30}


def test_the_start_is_the_ridge_solution(small, tmp_path):
    ridge = run(small(**HEAD, method="ridge"), tmp_path / "ridge")
    start = run(small(**HEAD, **STILL), tmp_path / "start")
    seed = run(small(**HEAD, lr=1e-30), tmp_path / "seed")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ridge", "start"))
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert (
        ridge["test"]["final"]["accuracy"]
        == start["test"]["final"]["accuracy"]
        > seed["test"]["final"]["accuracy"] + 0.3
    )
    assert start["bytes_up"] - seed["bytes_up"] > 3 * 4 * 129 * 130


def test_blocks_before_the_head_are_trained_from_there(small, tmp_path):
    settings = HEAD | {"train": "last:2", "model": "resnet8", "buffers": "frozen"}
    start = run(small(**settings, **STILL), tmp_path / "start")
    seed = run(small(**settings, lr=1e-30), tmp_path / "seed")
    assert start["test"]["final"]["accuracy"] > seed["test"]["final"]["accuracy"] + 0.2


def test_what_a_method_keeps_of_the_first_weights_is_made_anew(small, tmp_path, monkeypatch):
    seen = []
    init = FedPAC.init

    def watched(method, weights, layout, sizes):
        seen.append(init(method, weights, layout, sizes))
        return seen[-1]

    monkeypatch.setattr(FedPAC, "init", watched)
    run(small(**HEAD, **STILL, method="fedpac"), tmp_path / "run")
    first, second = (server.extra["heads"] for server in seen)
    assert not torch.equal(first, second)


def test_the_bits_do_not_depend_on_the_workers(small, contents, tmp_path):
    for workers in (0, 2):
        run(small(**HEAD | {"rounds": 2}, start="closed", workers=workers), tmp_path / str(workers))
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


def test_it_is_made_once_also_where_a_run_goes_on(small, tmp_path, monkeypatch):
    from fedld.engine import loop

    calls = []
    monkeypatch.setattr(loop, "start_closed", lambda exchange: calls.append(1) or start_closed(exchange))
    run(small(**HEAD, **STILL), tmp_path / "run")
    loop.resume(tmp_path / "run", rounds=2)
    assert calls == [1]
    assert len(read_run(tmp_path / "run").rounds.lines) == 2


def test_a_head_with_a_hidden_layer_has_no_closed_form(small, tmp_path):
    with pytest.raises(FedLDError, match="solves for a linear head, not for head = 'mlp:8'"):
        run(small(**HEAD, **STILL, head="mlp:8"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
