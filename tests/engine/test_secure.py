"""Runs in which the server sees sums alone: the plain run's model within the fixed-point error."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fedld.engine.loop import run
from fedld.errors import FedLDError


def model(path):
    return torch.cat([tensor.flatten().double() for tensor in load_file(path / "model.safetensors").values()])


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedadam"])
def test_a_secure_run_gives_the_plain_runs_model(small, tmp_path, method):
    settings = {"rounds": 2, "method": method, "client_losses": False}
    run(small(**settings), tmp_path / "plain")
    run(small(**settings, secure="sum"), tmp_path / "secure")
    plain, secure = model(tmp_path / "plain"), model(tmp_path / "secure")
    torch.testing.assert_close(secure, plain, rtol=1e-4, atol=1e-6)
    for line in (tmp_path / "secure/clients.jsonl").read_text().splitlines():
        assert "update_norm" not in json.loads(line)
    assert (
        not (tmp_path / "secure/conflict.jsonl").exists()
        or not (tmp_path / "secure/conflict.jsonl").read_text()
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": "consensus"}, "needs single updates"),
        ({"method": "fedld"}, "needs single updates"),
        ({"method": "scaffold"}, "needs single updates"),
        ({"decompose": 1}, "decompose"),
        ({"clients": 2}, "at least 3 clients"),
    ],
)
def test_what_needs_single_updates_is_refused_before_the_run(small, tmp_path, changes, problem):
    with pytest.raises(FedLDError, match=problem):
        run(small(**{"secure": "sum", **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_secure_sum_and_differential_privacy_go_together(small, tmp_path):
    pytest.importorskip("opacus")
    private = {"dp": "epsilon=8,delta=1e-5,clip=1", "client_losses": False, "local_steps": 1, "rounds": 1}
    run(small(secure="sum", partition="iid", **private), tmp_path / "run")
