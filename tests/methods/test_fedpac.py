import numpy as np
import pytest
import torch

from fedld.methods.features import by_class
from fedld.methods.fedpac import FedPAC, mixture, statistics
from fedld.models import build

CASES = ["m2_C2_d4", "m3_C2_d8", "m5_C2_d16", "m5_C3_d16", "m6_C10_d8", "m8_C5_d8", "identical_H", "zero_V"]


def network():
    return build("cnn", classes=2, image_size=8, seed=0)


@pytest.mark.parametrize("case", CASES)
def test_head_weights_are_the_exact_minimum(oracle, case):
    file = oracle("fedpac_and_averaging")
    v, h = file[f"{case}/V"].astype(float), file[f"{case}/H"].astype(float)
    h = h.reshape(len(v), -1)
    found = np.stack([mixture(h - h[i], v) for i in range(len(v))])
    np.testing.assert_allclose(found, file[f"{case}/W_exact"], atol=1e-6)


def test_statistics_are_those_of_the_mean_feature(images):
    """v is the variance of a client's mean one-hot-times-feature, which sampling theory gives directly."""
    client = images(FedPAC(), network()).client(0)
    with torch.no_grad():
        features, labels = client.model.eval().embed(client.samples.images), client.samples.labels
    products = torch.nn.functional.one_hot(labels, 2)[:, :, None] * features[:, None, :]
    h, v = statistics(by_class(client))
    torch.testing.assert_close(h, products.mean(0))
    expected = (products.square().sum((1, 2)).mean() - products.mean(0).square().sum()) / len(labels)
    torch.testing.assert_close(v, expected)


def test_head_and_body_take_turns(images):
    federation = images(FedPAC(head_epochs=0), network())
    layout = federation.layout
    federation.round()
    heads = torch.stack([m["head"] for m in federation.replies.messages])
    assert (heads == heads[0]).all(), "no head epoch: the head must not have moved"
    assert federation.replies.gradients.abs().sum() > 0
    assert {e.name for e in layout.entries if e.private} == {"classifier.2.weight", "classifier.2.bias"}


def test_every_client_gets_its_own_mixture_and_unsampled_ones_keep_theirs(images):
    federation = images(FedPAC(), network())
    federation.round()
    heads = federation.server.extra["heads"].clone()
    assert not torch.equal(heads[0], heads[1])
    federation.round(0, 1)
    assert torch.equal(federation.server.extra["heads"][2], heads[2])
    assert not torch.equal(federation.server.extra["heads"][0], heads[0])
    federation.load(2)
    torch.testing.assert_close(federation.flat.weights[federation.layout.shared :], heads[2])
    mean = torch.stack([m["head"] for m in federation.replies.messages]).mean(0)
    torch.testing.assert_close(
        federation.server.weights[federation.layout.shared : federation.layout.trainable], mean
    )


def test_alignment_pulls_towards_known_prototypes_only():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    message = {"prototypes": torch.tensor([[0.0, 0.0], [9.0, 9.0]]), "known": torch.tensor([1.0, 0.0])}
    value = FedPAC.alignment(features, torch.tensor([0, 1]), message)
    value.backward()
    torch.testing.assert_close(value.detach(), torch.tensor(5.0 / 4))
    torch.testing.assert_close(features.grad, torch.tensor([[0.5, 1.0], [0.0, 0.0]]))


def test_alignment_changes_the_body_from_the_second_round_on(images):
    results = []
    for lam in (0.0, 5.0):
        federation = images(FedPAC(lam=lam), network())
        results.append([federation.round()[: federation.layout.shared] for _ in range(2)])
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])


def test_prototypes_are_weighted_by_class_counts(images):
    federation = images(FedPAC(), network(), clients=2)
    federation.data[1].labels = torch.zeros(12, dtype=torch.int64)
    federation.round()
    messages, found = federation.replies.messages, federation.server.extra["prototypes"]
    torch.testing.assert_close(found[1], messages[0]["prototypes"][1])
    torch.testing.assert_close(
        found[0], (6 * messages[0]["prototypes"][0] + 12 * messages[1]["prototypes"][0]) / 18
    )
