"""Runs with centred steps: what they change, and where they are refused."""

import pytest
import torch
from safetensors.torch import load_file

from fedld.engine.loop import run
from fedld.errors import FedLDError

BLOCKS = {"clients": 3, "rounds": 2, "image_size": 8, "model": "resnet8", "train": "last:2"}
CENTRED = BLOCKS | {"buffers": "frozen", "steps": "centred", "lr": 0.01}


@pytest.mark.parametrize("method", ["fedavg", "scaffold", {"name": "scaffold", "first": "gradient"}])
def test_a_run_takes_other_steps_and_its_model_is_an_ordinary_one(small, tmp_path, method):
    centred = run(small(**CENTRED, method=method), tmp_path / "centred")
    run(small(**CENTRED | {"steps": "plain"}, method=method), tmp_path / "plain")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("centred", "plain"))
    assert ours.keys() == theirs.keys()
    assert not torch.equal(ours["fc.weight"], theirs["fc.weight"])
    assert torch.equal(ours["bn1.running_mean"], theirs["bn1.running_mean"])
    assert centred["bytes_up"] > 0


def test_the_bits_do_not_depend_on_the_workers(small, contents, tmp_path):
    for workers in (0, 2):
        run(small(**CENTRED, start="closed", workers=workers), tmp_path / str(workers))
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"train": "head"}, "needs trained layers before the head"),
        ({"buffers": "global"}, "set buffers to frozen"),
        ({"optimiser": "adam"}, "is for sgd and nesterov"),
        ({"method": "fedcm"}, "steps = 'centred'"),
    ],
)
def test_where_steps_cannot_be_centred_it_is_a_sentence(small, tmp_path, change, reason):
    with pytest.raises(FedLDError, match=reason):
        run(small(**CENTRED | change), tmp_path / "run")
    assert not (tmp_path / "run").exists()
