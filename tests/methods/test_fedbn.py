from dataclasses import replace

import torch

from fedld.methods import METHODS
from fedld.models import batchnorm_names, build

FEDBN = METHODS["fedbn"]


def network():
    return build("resnet8", classes=2, image_size=8, seed=0)


def test_exactly_the_batchnorm_modules_are_private(images):
    federation = images(FEDBN, network())
    private = {entry.name for entry in federation.layout.entries if entry.private}
    assert private == batchnorm_names(federation.model)
    assert len(private) == 9 * 5  # nine modules: weight, bias, mean, variance, counter


def test_a_client_keeps_its_batchnorm_while_it_is_not_sampled(images):
    federation = images(FEDBN, network())
    federation.round()
    mine = federation.states[2]["private"].clone()
    assert not torch.equal(mine, federation.states[0]["private"])
    federation.round(0, 1)
    federation.load(2)
    assert torch.equal(federation.layout.private_part(federation.flat.vector), mine)


def test_the_global_model_and_unseen_clients_have_the_mean_batchnorm(images):
    federation = images(FEDBN, network())
    federation.training[1] = replace(federation.training[1], epochs=3)
    federation.round(0, 1)
    layout = federation.layout
    own = torch.stack([federation.states[i]["private"] for i in (0, 1)])
    counter = torch.cat(
        [torch.full((e.size,), e.kind == "counter") for e in federation.layout.entries if e.private]
    )
    mean = torch.where(counter, own.amax(0), own.mean(0))
    torch.testing.assert_close(layout.private_part(federation.server.weights), mean)
    federation.load(2)
    torch.testing.assert_close(layout.private_part(federation.flat.vector), mean)


def test_it_differs_from_fedavg_only_by_what_is_private(images):
    fedbn, fedavg = images(FEDBN, network()), images(METHODS["fedavg"], network())
    fedbn.round(), fedavg.round()
    a, b = fedbn.layout.views(fedbn.server.weights), fedavg.layout.views(fedavg.server.weights)
    for name in a:
        if "num_batches" not in name:
            torch.testing.assert_close(a[name], b[name])
    second = fedbn.round(), fedavg.round()
    assert not torch.equal(second[0], second[1])


def test_without_batchnorm_it_is_fedavg(images):
    plain = [
        images(METHODS[name], build("cnn", classes=2, image_size=8, seed=0)) for name in ("fedbn", "fedavg")
    ]
    for _ in range(2):
        assert torch.equal(plain[0].round(), plain[1].round())
