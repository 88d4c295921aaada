import torch

from fedld.methods.personal import PFedLA, alpha, layer_mixture, spans
from fedld.models import build


def federation_of(images, **options):
    return images(PFedLA(**options), build("cnn", classes=2, image_size=8, seed=0))


def test_it_begins_as_the_plain_mean_of_the_models_that_exist(images):
    federation = federation_of(images)
    federation.round(0, 1)
    models = federation.server.extra["models"]
    for client in range(3):
        torch.testing.assert_close(
            layer_mixture(federation.server.extra, client), (models[0] + models[1]) / 2
        )


def test_the_models_kept_are_those_the_clients_trained(images):
    federation = federation_of(images)
    federation.round()
    federation.method.client_update(federation.client(1))
    trained = federation.flat.vector.clone()
    federation.round(1)
    torch.testing.assert_close(federation.server.extra["models"][1], trained)


def test_hypernetworks_descend_the_jacobian_of_the_mixture(images):
    """Each step is -lr J'(theta - theta'), here with J by automatic differentiation of the whole mixture."""
    federation = federation_of(images, hn_lr=0.5)
    federation.round()
    before = {key: value.clone() for key, value in federation.server.extra.items()}
    start = layer_mixture(before, 0)
    federation.round(0)
    after, cut = federation.server.extra, federation.layout.trainable
    change = (start - after["models"][0])[:cut]
    leaf = before["w2"][0].clone().requires_grad_()
    weights = alpha({"v": before["v"][0], "w1": before["w1"][0], "w2": leaf}, before["seen"])
    mixed = torch.cat([weights[layer].double() @ before["models"][:, span] for layer, span in spans(before)])
    (mixed[:cut] @ change).backward()
    assert leaf.grad.abs().sum() > 0
    torch.testing.assert_close(after["w2"][0], before["w2"][0] - 0.5 * leaf.grad)
    assert torch.equal(after["w2"][1], before["w2"][1]), "client 1 was not sampled"


def test_clients_get_different_mixtures_by_layer(images):
    federation = federation_of(images, hn_lr=20.0)
    for _ in range(3):
        federation.round()
    extra = federation.server.extra
    rows = [alpha({k: extra[k][i] for k in ("v", "w1", "w2")}, extra["seen"]) for i in range(3)]
    torch.testing.assert_close(rows[0].sum(1), torch.ones_like(rows[0][:, 0]))
    assert not torch.allclose(rows[0], rows[1])
    assert not torch.allclose(rows[0][0], rows[0][1])
