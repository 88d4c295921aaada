"""The memory estimate is near the truth, and a run that cannot fit is refused before it touches the disk."""

import pytest
import torch

from fedld.engine import hardware
from fedld.engine.loop import run
from fedld.engine.setup import prepare
from fedld.errors import FedLDError


def test_a_run_that_cannot_fit_is_refused_with_what_to_lower(small, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "free_memory", lambda: 100 << 20)
    with pytest.raises(FedLDError, match=r"needs about .* GiB .* lower batch_size, workers"):
        run(small(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_activations_are_counted_as_autograd_keeps_them(small, tmp_path):
    setup, _ = prepare(small(), tmp_path)
    _, height, width, channels = setup.federation.images.shape
    first = 32 * height * width * 4  # the first convolution's output, kept by relu or pooling
    counted = hardware.activation_bytes(setup)
    assert first < counted < 20 * first + channels * height * width * 4


def test_the_estimate_grows_with_clients_by_their_updates_only(small, tmp_path):
    setup, _ = prepare(small(), tmp_path)
    difference = hardware.estimate(setup, 11, 2) - hardware.estimate(setup, 10, 2)
    assert difference == 4 * setup.layout.size


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(small, tmp_path):
    with pytest.raises(FedLDError, match="torch sees no GPU"):
        run(small(device="cuda"), tmp_path / "run")
