"""Runs on an accelerator agree with runs on the processor (`make test-device`); skipped without one."""

import numpy as np
import pytest
import torch

import fedld
from fedld.engine.hardware import default_workers, find_device, worker_device
from fedld.errors import FedLDError
from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Training
from fedld.local.base import Objective
from fedld.local.samples import Samples
from fedld.models import build

HERE = find_device("auto")
SMALL = {
    "clients": 3,
    "rounds": 2,
    "batch_size": 20,
    "lr": 0.05,
    "decompose": 2,
    "workers": 0,
    "samples": 150,
}
METHODS = ["fedavg", "scaffold", "fedld", "fedld-drift", "fedpac", "fedbn", "ridge"]


def trained(method, device, tmp_path, **settings):
    model = "resnet8" if method == "fedbn" else "cnn"
    more = {"train": "head"} if method == "ridge" else {}
    data = fedld.data("fundus-sim", clients=3, image_size=16, samples=150)
    shared = {key: value for key, value in SMALL.items() if key not in ("samples", "clients")}
    return fedld.run(
        method,
        data,
        model=model,
        device=device,
        out=tmp_path / device.replace(":", "-"),
        **shared | more | settings,
    )


@pytest.mark.skipif(HERE == "cpu", reason="there is no accelerator here")
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_the_processor(method, tmp_path):
    """To rounding errors of float32 over two rounds; the terms of the loss add up."""
    ours, theirs = (trained(method, device, tmp_path) for device in (HERE, "cpu"))
    for name, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name].cpu(), value, rtol=1e-2, atol=1e-3)
    last = ours.rounds[-1]
    terms = (last[key] for key in ("local_loss", "shift_loss", "aggregation_loss"))
    assert sum(terms) == pytest.approx(last["global_loss"], abs=1e-4)


def one_step(dtype, scale=2.0**16):
    """A client after one step of plain gradient descent, and how far it went."""
    model = build("cnn", classes=3, channels=1, image_size=8, seed=0)
    layout = Layout.of(model)
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)
    samples = Samples(images, np.arange(40) % 3, np.arange(40), (0.5,), (0.3,), HERE)
    training = Training(epochs=1, batch_size=40, lr=0.1, momentum=0.0, dtype=dtype)
    client = LocalClient(
        name="x",
        round=1,
        flat=FlatModel(model, layout, HERE),
        samples=samples,
        training=training,
        seed=0,
        scale=scale,
    )
    client.train(Objective().loss)
    return client, layout.shared_parameters(client.reply().update).cpu()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_in_mixed_precision_is_that_of_float32_but_for_rounding(dtype):
    (_, whole), (_, mixed) = one_step("float32"), one_step(dtype)
    assert torch.nn.functional.cosine_similarity(whole, mixed, dim=0) > 0.99
    assert mixed.norm().item() == pytest.approx(whole.norm().item(), rel=0.03)


def test_a_gradient_that_overflows_in_float16_is_computed_again():
    usual, expected = one_step("float16")
    large, found = one_step("float16", scale=2.0**40)
    assert large.scale < 2.0**40
    assert usual.steps == large.steps == 1
    torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-4)


def test_auto_takes_what_is_there_and_others_are_refused():
    assert HERE in ("cpu", "cuda", "mps")
    assert find_device("cpu") == "cpu"
    with pytest.raises(FedLDError, match="device is auto, cpu, cuda"):
        find_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(FedLDError, match="device 'cuda:1' asked for, but torch sees no GPU here"):
            find_device("cuda:1")
    if not torch.backends.mps.is_available():
        with pytest.raises(FedLDError, match="no Apple GPU"):
            find_device("mps")


def test_workers_share_gpus_in_turn(monkeypatch):
    """Two GPUs that are pretended: what is asked of torch, not how it computes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [worker_device("cuda", rank) for rank in range(5)] == [f"cuda:{k}" for k in (0, 1, 0, 1, 0)]
    assert worker_device("cuda:1", 3) == "cuda:1"
    assert worker_device("cpu", 3) == "cpu"
    assert [default_workers(device, 8) for device in ("cpu", "cuda", "cuda:1", "mps")] == [8, 2, 1, 1]
    assert find_device("auto") == "cuda"
    assert find_device("cuda:1") == "cuda:1"
    with pytest.raises(FedLDError, match="there are 2, from cuda:0"):
        find_device("cuda:2")
