"""Centred steps: the step that plain SGD takes in the network whose inputs are centred and outputs scaled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedld.layout import FlatModel, Layout
from fedld.methods.sum_bounds import centre_sums_problem
from fedld.models import build
from fedld.models.centring import (
    CentredSteps,
    add_centres,
    centred_layers,
    input_sums,
    is_centre,
    set_centres,
)


def network(groups):
    """Convolution, frozen BatchNorm and a linear head, with statistics that are not 0 and 1."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 6 if groups == 1 else 4, 3, padding=1, groups=groups, bias=False),
        nn.BatchNorm2d(6 if groups == 1 else 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear((6 if groups == 1 else 4) * 9, 2),
    ).eval()
    for tensor in (model[1].weight, model[1].running_var, model[1].running_mean, model[1].bias):
        tensor.data.uniform_(0.5, 2)
    return add_centres(model)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_step_is_one_of_plain_sgd_with_centred_inputs_and_scaled_weights(groups):
    model = network(groups)
    flat = FlatModel(model, Layout.of(model))
    images, labels = torch.rand(5, 4, 3, 3), torch.tensor([0, 1, 1, 0, 1])
    sums = input_sums(model, lambda: model(images))
    flat.load(set_centres(flat.vector, flat.layout, sums, len(images)))
    conv, norm, _, _, head = model

    # The same network in other parameters: V = s W, b = beta + s (W c - m), and for the head b + W c.
    gain = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().view(-1, 1, 1, 1)
    weight = (gain * conv.weight).detach().requires_grad_()
    at_centre = (weight * conv.centre).flatten(1).sum(1)
    bias = (norm.bias + at_centre - gain.flatten() * norm.running_mean).detach().requires_grad_()
    head_weight = head.weight.detach().clone().requires_grad_()
    head_bias = (head.bias + head.weight @ head.centre).detach().requires_grad_()

    def other(images):
        centred = F.unfold(images, 3, padding=1).unflatten(1, (4, 9))
        if groups == 1:
            patches = centred.flatten(1, 2) - conv.centre.reshape(1, -1, 1)
            out = torch.einsum("op,npl->nol", weight.flatten(1), patches)
        else:
            out = torch.einsum("cp,ncpl->ncl", weight.flatten(1), centred - conv.centre.view(4, 9, 1))
        features = F.relu(out + bias[:, None]).flatten(1)
        return F.linear(features - head.centre, head_weight, head_bias)

    torch.testing.assert_close(other(images), model(images), rtol=1e-4, atol=1e-4)

    F.cross_entropy(other(images), labels).backward()
    flat.gradient.zero_()
    F.cross_entropy(model(images), labels).backward()
    norm.weight.grad.zero_()  # the gain is no parameter of the other network
    CentredSteps(model, flat.layout, flat.vector.clone()).apply(flat.gradient)
    flat.weights.sub_(flat.gradient, alpha=0.01)
    with torch.no_grad():
        for tensor in (weight, bias, head_weight, head_bias):
            tensor.sub_(0.01 * tensor.grad)
    torch.testing.assert_close(other(images), model(images), rtol=1e-4, atol=1e-4)


def test_centres_are_means_over_images_and_positions():
    model = network(1)
    images = torch.rand(7, 4, 3, 3)
    layout = Layout.of(model)
    sums = input_sums(model, lambda: [model(part) for part in images.split(3)])
    views = layout.views(set_centres(layout.flatten(model), layout, sums, len(images)))
    expected = F.unfold(images, 3, padding=1).mean((0, 2)).view(4, 3, 3)
    torch.testing.assert_close(views["0.centre"], expected)
    features = model[:4](images)
    torch.testing.assert_close(views["4.centre"], features.mean(0), rtol=1e-5, atol=1e-6)


def test_all_convolutions_of_a_mobilenet_are_centred():
    model = build("mobilenet_v2", classes=2, image_size=32, seed=0)
    weights = [name.removesuffix(".weight") for name, p in model.named_parameters() if p.ndim in (2, 4)]
    assert [layer.name for layer in centred_layers(model)] == weights


def test_layers_without_a_bias_or_a_frozen_norm_keep_plain_steps():
    names = [layer.name for layer in centred_layers(build("resnet8-gn", classes=2, image_size=8, seed=0))]
    assert names == ["fc"]
    model = add_centres(build("resnet8", classes=2, image_size=8, seed=0))
    assert [name for name, _ in model.named_buffers() if is_centre(name)]
    assert not [name for name in model.state_dict() if is_centre(name)]


def test_sums_that_no_images_have_are_refused():
    good = {"sums": torch.full((5,), 6.0), "count": torch.tensor(3.0)}
    assert centre_sums_problem(good, 3) is None
    assert "shape" in centre_sums_problem({**good, "sums": torch.zeros(2, 5)}, 3)
    assert "above" in centre_sums_problem({**good, "sums": torch.full((5,), 1e6)}, 3)
    assert centre_sums_problem({**good, "count": torch.tensor(9.0)}, 3) is not None
