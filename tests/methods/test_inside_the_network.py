"""FedIIR and FedSR, whose terms look at the features and the head."""

import numpy as np
import pytest
import torch
from torch import nn

from fedld.layout import FlatModel, Layout
from fedld.local import Context
from fedld.methods import METHODS
from fedld.methods.fediir import FedIIR
from fedld.methods.representation import FedSR, divergence
from fedld.models import Model, build


class HeadOnly(Model):
    """Images are features already."""

    def __init__(self, weight):
        super().__init__()
        self.top = nn.Linear(weight.shape[1], weight.shape[0]).double()
        with torch.no_grad():
            self.top.weight.copy_(weight)
            self.top.bias.zero_()

    def embed(self, x):
        return x

    @property
    def head(self):
        return self.top


def network():
    return build("cnn", classes=2, image_size=8, seed=0)


def test_fediir_penalty_and_its_gradients(oracle):
    file = {k: torch.from_numpy(v) for k, v in oracle("local_traces").items() if k.startswith("fediir/")}
    model, features = HeadOnly(file["fediir/W"]), file["fediir/h"].clone().requires_grad_()
    flat = FlatModel(model, Layout.of(model))
    context = Context(
        flat=flat,
        images=features,
        labels=file["fediir/y"],
        client_labels=file["fediir/y"],
        incoming=flat.vector,
        round=1,
    )
    value, own = FedIIR().head_gradient(context)
    common = torch.cat([file["fediir/gmean_W"].flatten(), file["fediir/gmean_b"]])
    penalty = (own - common).square().sum()
    (value + 1e-2 * penalty).backward()
    np.testing.assert_allclose(value.item(), file["fediir/ce"], rtol=1e-10)
    np.testing.assert_allclose(penalty.item(), file["fediir/penalty"], rtol=1e-10)
    torch.testing.assert_close(features.grad, file["fediir/grad_h"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.top.weight.grad, file["fediir/grad_W"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.top.bias.grad, file["fediir/grad_b"], rtol=1e-10, atol=1e-12)


def test_fediir_sends_the_gradient_at_the_incoming_model_and_averages_it_from_zero(images):
    federation = images(FedIIR(ema=0.9), network())
    federation.load(0)
    data = federation.data[0]
    loss = nn.functional.cross_entropy(federation.model(data.images), data.labels)
    head = torch.autograd.grad(loss, list(federation.model.head.parameters()))
    federation.round()
    sent = [message["gradient"] for message in federation.prepared]
    torch.testing.assert_close(sent[0], torch.cat([part.flatten() for part in head]))
    first = torch.stack(sent).mean(0)
    torch.testing.assert_close(federation.server.extra["gm"], 0.1 * first)
    federation.round()
    second = torch.stack([message["gradient"] for message in federation.prepared]).mean(0)
    torch.testing.assert_close(federation.server.extra["gm"], 0.09 * first + 0.1 * second)


@pytest.mark.parametrize("lagged", [False, True])
def test_fediir_penalises_from_the_first_round_unless_its_gradients_are_lagged(images, lagged):
    plain, penalised = (images(FedIIR(gamma=gamma, lagged=lagged), network()) for gamma in (0.0, 1.0))
    assert torch.equal(plain.round(), penalised.round()) == lagged
    assert not torch.allclose(plain.round(), penalised.round())


def test_fedsr_terms(oracle):
    f = {
        k.removeprefix("fedsr/"): torch.from_numpy(v)
        for k, v in oracle("local_traces").items()
        if "fedsr" in k
    }
    sigma = nn.functional.softplus(f["r_sigma_raw"])[f["y"]]
    found = divergence(f["mu"] * f["C"], f["sigma"] * f["C"], f["r_mu"][f["y"]], sigma)
    torch.testing.assert_close(found, f["CMI"], rtol=1e-10, atol=0)
    torch.testing.assert_close(f["z"].norm(dim=1).mean(), f["L2R"], rtol=1e-10, atol=0)


def test_fedsr_loss_is_its_three_terms(images):
    federation = images(FedSR(l2r=0.3, cmi=0.7), network())
    client, data = federation.client(0), federation.data[0]
    model = client.model
    with torch.no_grad():
        torch.manual_seed(5)
        found = federation.method.loss(client.context(data.images, data.labels))
        torch.manual_seed(5)
        mu = model.embed(data.images)
        sigma = torch.full_like(mu, np.log(2.0))  # softplus(0): the new layer starts at zero
        z = mu + sigma * torch.randn_like(mu)
        r = torch.full_like(mu, np.log1p(np.e))
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mu, sigma), torch.distributions.Normal(0 * mu, r)
        )
        expected = nn.functional.cross_entropy(model.head(z), data.labels)
        expected = expected + 0.3 * z.norm(dim=1).mean() + 0.7 * kl.sum(1).mean()
    torch.testing.assert_close(found, expected)


def test_fedsr_keeps_references_with_the_client_and_predicts_without_them(images):
    federation = images(FedSR(), network())
    federation.round()
    references = [federation.states[i]["private"] for i in range(3)]
    assert not torch.equal(references[0], references[1])
    names = {entry.name for entry in federation.layout.entries if entry.private}
    assert names == {"r_mu", "r_sigma", "r_scale"}
    federation.load(0)
    model, x = federation.model.eval(), federation.data[0].images
    assert torch.equal(model(x), model.head(model.embed(x)))
    assert federation.replies.layout.views(federation.server.weights)["spread.bias"].abs().sum() > 0


@pytest.mark.parametrize("name", ["fediir", "fedsr", "fedpac"])
def test_a_network_without_features_is_refused(name):
    from fedld.errors import FedLDError

    with pytest.raises(FedLDError, match="features and a head"):
        METHODS[name].check(nn.Linear(2, 2))
