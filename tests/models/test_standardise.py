"""Heads on frozen features: inputs standardised over all clients, by sums that add up."""

import numpy as np
import pytest
import torch

from fedld.config.experiment import make_experiment
from fedld.engine.loop import run
from fedld.models import build
from fedld.models.standardise import StandardisedLinear, moments, standardise_head, standardised


def test_clients_sums_give_the_pooled_moments():
    pooled = torch.from_numpy(np.random.default_rng(0).normal(3, 2, (50, 4)))
    parts = pooled.split([5, 15, 30])
    total, squares = (sum(f(part).sum(0) for part in parts) for f in (torch.clone, torch.square))
    shift, scale = moments(total, squares, torch.tensor(50.0))
    torch.testing.assert_close(shift, pooled.mean(0).float())
    torch.testing.assert_close(scale, (1 / (pooled.std(0, correction=0) + 1e-3)).float())


@pytest.mark.parametrize("head", ["linear", "mlp:8"])
def test_names_and_weights_stay_and_nothing_changes_until_told(head):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    plain = build("resnet8", classes=3, image_size=16, seed=0, head=head)
    new = standardise_head(build("resnet8", classes=3, image_size=16, seed=0, head=head))
    assert torch.equal(torch.get_rng_state(), state)
    extra = new.state_dict().keys() - plain.state_dict().keys()
    assert {name.rpartition(".")[2] for name in extra} == {"shift", "scale"}
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(new.eval()(images), plain.eval()(images))
    assert isinstance(standardised(new), StandardisedLinear)
    assert standardised(plain) is None


def test_a_run_fixes_them_before_the_first_round(tmp_path):
    """The saved model standardises what its own trunk gives for the clients' images."""
    from safetensors.torch import load_file

    from fedld.config.resolve import make_data_spec
    from fedld.data import load
    from fedld.engine.network import whole_network
    from fedld.local import Samples

    settings = {"dataset": "digits", "clients": 3, "rounds": 1, "model": "resnet8", "train": "head"}
    experiment = make_experiment(settings | {"workers": 0, "client_losses": False})
    run(experiment, tmp_path / "run")
    federation = load(make_data_spec(experiment))
    model = whole_network(experiment, federation)
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    rows = np.concatenate([client.train for client in federation.clients])
    samples = Samples(federation.images, federation.labels, rows, federation.mean, federation.std)
    layer = standardised(model)
    with torch.inference_mode():
        inputs = (model.eval().embed(samples.batch(slice(None))[0]) - layer.shift) * layer.scale
    spread = inputs.std(0, correction=0)
    assert inputs.mean(0).abs().max() < 1e-3
    assert ((spread > 0.9) & (spread < 1.001)).float().mean() > 0.9
