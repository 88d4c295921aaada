import numpy as np
import pytest
import torch

from fedld.errors import FedLDError
from fedld.layout import Layout
from fedld.methods.base import Server
from fedld.methods.baselines import FedAvg
from fedld.methods.matching import GAMF, FedMA, Matching, layers, rearranged, sinkhorn
from fedld.models import build


def network(name="cnn", seed=0):
    return build(name, classes=3, image_size=16, seed=seed).double()


@pytest.mark.parametrize("case", ["perm_only", "noisy", "two"])
def test_bbp_matching_is_exact(oracle, case):
    file, generator = oracle("matching"), np.random.RandomState(0)
    weights = file[f"{case}/W"]
    sweeps = [generator.permutation(len(weights)) for _ in range(5)]
    found = Matching(neurons=list(weights), gamma=float(file[f"{case}/gamma"])).run(sweeps)
    assert [found.assignment[j].tolist() for j in range(len(weights))] == file[f"{case}/assignment"].tolist()
    np.testing.assert_allclose(
        found.means, file[f"{case}/global_weights_over_sigmas"], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize(("tau", "iterations"), [(1.0, 10), (0.05, 200), (0.005, 500)])
def test_sinkhorn(oracle, tau, iterations):
    file = oracle("matching")
    found = sinkhorn(torch.from_numpy(file["sinkhorn/s"]) / tau, iterations)
    np.testing.assert_allclose(
        found.numpy(), file[f"sinkhorn/tau{tau}_it{iterations}"], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("name", ["cnn", "vgg9"])
def test_rearranging_neurons_changes_nothing_but_their_order(name):
    model = network(name)
    layout = Layout.of(model)
    vector = layout.flatten(model)
    for index, (_, value) in enumerate(sorted(layout.views(vector).items())):
        value.add_(0.01 * index)  # biases start at zero
    generator = np.random.default_rng(1)
    orders = [generator.permutation(len(layer.bias)) for layer in layers(layout, vector)[:-1]]
    turned = rearranged(layout, vector, orders)
    assert not torch.equal(turned, vector)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    logits = []
    for weights in (vector, turned):
        model.load_state_dict(layout.export(weights))
        logits.append(model(x))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("method", [FedMA(), GAMF()])
def test_shuffled_copies_of_one_network_are_recognised(method):
    """Three clients hold one network with shuffled neurons and a little noise."""
    model = network()
    layout = Layout.of(model)
    vector, generator = layout.flatten(model), np.random.default_rng(2)
    noise = torch.Generator().manual_seed(1)
    clients, truth = [], []
    for i in range(3):
        orders = [generator.permutation(len(layer.bias)) for layer in layers(layout, vector)[:-1]]
        if i == 0:
            orders = [np.arange(len(order)) for order in orders]
        noisy = vector + 0.003 * torch.randn(vector.shape, generator=noise, dtype=vector.dtype)
        clients.append(rearranged(layout, noisy, orders))
        truth.append([np.argsort(order) for order in orders])
    server = method.init(vector, layout, [1, 1, 1])
    found = method.orders(server, [layers(layout, client) for client in clients])
    for own, expected in zip(found, truth, strict=True):
        for order, right in zip(own, expected, strict=True):
            np.testing.assert_array_equal(order, right)


@pytest.mark.parametrize("method", [FedMA(), GAMF()])
def test_the_server_averages_matched_models(images, method):
    federation = images(method, network())
    federation.round()
    plain = images(FedAvg(), network())
    plain.round()
    layout, start = federation.layout, plain.layout.flatten(network())
    turned = [np.roll(np.arange(len(layer.bias)), 1) for layer in layers(layout, start)[:-1]]
    updates = federation.replies.updates.clone()
    updates[1] = rearranged(layout, start + updates[1], turned) - start
    from dataclasses import replace

    server = method.init(start, layout, [1, 1, 1])
    straight, _ = method.server_update(server, federation.replies)
    shuffled, _ = method.server_update(server, replace(federation.replies, updates=updates))
    torch.testing.assert_close(straight.weights, shuffled.weights)
    broken, _ = FedAvg().server_update(Server(start), replace(federation.replies, updates=updates))
    assert not torch.allclose(broken.weights, shuffled.weights)


def test_fedma_freezes_one_layer_more_each_round(images):
    federation = images(FedMA(), network())
    names = [entry.name for entry in federation.layout.entries if entry.name.endswith("weight")]
    before = federation.server.weights.clone()
    for frozen in [0, 1, 2, 3, 4, 0]:
        assert int(federation.server.extra["frozen"]) == frozen
        federation.round()
        change = federation.layout.views(federation.server.weights - before)
        assert [bool(change[name].any()) for name in names] == [k >= frozen for k in range(len(names))]
        before = federation.server.weights.clone()


def test_fedma_averages_each_class_of_the_last_layer_by_its_own_counts(images):
    """Client 0 has class 0 only, client 1 has three quarters of class 1, client 2 the rest of it."""
    federation = images(FedMA(clip=float("inf")), network())
    for data, labels in zip(federation.data, ([0] * 12, [1] * 9 + [0] * 3, [1] * 3 + [0] * 9), strict=True):
        data.labels = torch.tensor(labels)
    federation.round()
    weight, bias = federation.layout.entries[-2:]
    for entry in (weight, bias):
        assert entry.name.startswith("classifier")
        own = torch.stack([entry.view(update) for update in federation.replies.updates])
        moved = entry.view(federation.server.weights - federation.layout.flatten(network()))
        torch.testing.assert_close(moved[0], (12 * own[0, 0] + 3 * own[1, 0] + 9 * own[2, 0]) / 24)
        torch.testing.assert_close(moved[1], (9 * own[1, 1] + 3 * own[2, 1]) / 12)


def test_fedma_clips_gradients(images):
    free, clipped = (images(FedMA(clip=clip), network(), epochs=3) for clip in (float("inf"), 1e-3))
    free.round(), clipped.round()
    assert clipped.replies.updates.norm(dim=1).max() <= 3 * 0.05 * 1e-3 * 1.001
    plain = images(FedAvg(), network(), epochs=3)
    plain.round()
    torch.testing.assert_close(free.replies.updates, plain.replies.updates)


@pytest.mark.parametrize("name", ["resnet8", "mobilenet_v2", "resnet8-gn"])
@pytest.mark.parametrize("method", [FedMA(), GAMF()])
def test_networks_that_cannot_be_matched_are_refused(method, name):
    with pytest.raises(FedLDError, match="cannot match"):
        method.check(build(name, classes=2, image_size=32, seed=0))


def test_gamf_tells_channels_apart_by_what_they_feed():
    """All channels of the first layer see the same; only their outgoing weights differ."""
    model = network()
    layout, method = Layout.of(model), GAMF()
    vector = layout.flatten(model)
    first = layout.entries[0].view(vector)
    first.copy_(first[:1].expand_as(first))
    widths = [len(layer.bias) for layer in layers(layout, vector)[:-1]]
    orders = [np.random.default_rng(4).permutation(widths[0]), *(np.arange(width) for width in widths[1:])]
    clients = [layers(layout, vector), layers(layout, rearranged(layout, vector, orders))]
    found = method.orders(method.init(vector, layout, [1, 1]), clients)
    np.testing.assert_array_equal(found[1][0], np.argsort(orders[0]))
