"""The final model as a mean of the rounds' models."""

import pytest
import torch
from safetensors.torch import load_file

from fedld.engine.loop import resume, run
from fedld.errors import FedLDError

DECAY = 0.5


def test_the_final_model_is_the_mean_of_all_rounds(small, tmp_path):
    settings = {"rounds": 3, "clients": 3, "keep_checkpoints": 3, "model": "resnet8"}
    plain = run(small(**settings), tmp_path / "plain")
    mean = run(small(**settings, average_models=DECAY), tmp_path / "mean")
    checkpoints = [tmp_path / f"plain/checkpoints/round_0000{t}.safetensors" for t in (1, 2, 3)]
    one, two, three = (load_file(file)["weights"].double() for file in checkpoints)
    expected = (DECAY**2 * one + DECAY * two + three) / (DECAY**2 + DECAY + 1)
    kept = load_file(tmp_path / "mean/checkpoints/round_00003.safetensors")
    assert torch.equal(kept["weights"].double(), three)  # clients train from the last model
    torch.testing.assert_close(kept["mean"].double(), expected, rtol=1e-5, atol=1e-6)
    assert mean["test"]["final"]["loss"] != plain["test"]["final"]["loss"]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("mean", "plain"))
    assert not torch.equal(ours["fc.weight"], theirs["fc.weight"])
    assert torch.equal(ours["bn1.num_batches_tracked"], theirs["bn1.num_batches_tracked"])


def test_a_run_that_goes_on_has_the_same_mean(small, tmp_path, contents):
    settings = {"clients": 3, "average_models": 0.9, "decompose": 2}
    run(small(rounds=3, **settings), tmp_path / "long")
    run(small(rounds=2, **settings), tmp_path / "short")
    resume(tmp_path / "short", rounds=3)
    assert contents(tmp_path / "short") == contents(tmp_path / "long")


def test_a_method_without_a_global_model_is_refused(small, tmp_path):
    with pytest.raises(FedLDError, match="average_models averages global models, and method 'local'"):
        run(small(method="local", average_models=0.9), tmp_path / "run")
    assert not (tmp_path / "run").exists()
