from itertools import pairwise

import pytest
import torch

from fedld.errors import FedLDError
from fedld.layout import FlatModel, Layout
from fedld.models import NAMES, PlainCNN, batchnorm_names, build, head_names
from fedld.models.networks import DepthwiseConv2d, GlobalMean

# Parameter counts of torchvision's models (1000 classes, 3 channels), as its documentation states them.
PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet_v2": 3_504_872,
    "efficientnet_lite0": 4_652_008,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("image_size", "channels"), [(8, 1), (28, 1), (37, 3), (64, 3)])
def test_every_model_takes_every_size(name, image_size, channels):
    model = build(name, classes=3, channels=channels, image_size=image_size, seed=0).eval()
    x = torch.randn(2, channels, image_size, image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, features = model(x), model.embed(x)
        assert logits.shape == (2, 3)
        assert features.shape == (2, model.head.in_features)
        torch.testing.assert_close(logits, model.head(features))
        channels_last = model(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(logits, channels_last, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, count):
    model = build(name, classes=1000, image_size=64, seed=0)
    assert sum(p.numel() for p in model.parameters()) == count


def test_torchvision_names():
    names = set(build("resnet50", classes=2, image_size=64, seed=0).state_dict())
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer4.2.bn3.bias",
        "fc.bias",
    } <= names
    assert {"layer2.0.downsample.0.weight", "layer2.0.downsample.1.num_batches_tracked"} <= names
    assert (
        "layer1.0.downsample.0.weight" not in build("resnet18", classes=2, image_size=64, seed=0).state_dict()
    )
    names = set(build("mobilenet_v2", classes=2, image_size=64, seed=0).state_dict())
    assert {
        "features.0.0.weight",
        "features.1.conv.1.weight",
        "features.18.1.bias",
        "classifier.1.bias",
    } <= names


def test_initialisation_depends_on_the_seed_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = build("resnet8", classes=2, image_size=32, seed=1).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    again = build("resnet8", classes=2, image_size=32, seed=1).state_dict()
    other = build("resnet8", classes=2, image_size=32, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])
    assert not torch.equal(first["layer1.0.conv1.weight"], first["layer1.0.conv2.weight"])


def test_same_seed_shares_the_trunk_between_heads():
    two, five = (build("cnn", classes=c, image_size=28, seed=0).state_dict() for c in (2, 5))
    same = {
        name for name in two if two[name].shape == five[name].shape and torch.equal(two[name], five[name])
    }
    assert same == set(two) - {"classifier.2.weight", "classifier.2.bias"}


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    model = build(name, classes=2, image_size=32, seed=0).train()
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


@pytest.mark.parametrize("name", NAMES)
def test_head_names(name):
    model = build(name, classes=4, image_size=32, seed=0)
    weight, bias = head_names(model)
    assert model.get_parameter(weight) is model.head.weight
    assert model.get_parameter(bias) is model.head.bias


def test_batchnorm_names_are_found_by_type():
    model = build("resnet8", classes=2, image_size=32, seed=0)
    names = batchnorm_names(model)
    assert "layer2.0.downsample.1.running_var" in names
    assert names == {n for n in model.state_dict() if "bn" in n or "downsample.1" in n}
    for name in ("cnn", "vgg9", "resnet8-gn"):
        assert batchnorm_names(build(name, classes=2, image_size=32, seed=0)) == set()
    grouped = build("mobilenet_v2", classes=2, image_size=32, seed=0, norm="group")
    assert batchnorm_names(grouped) == set()
    assert batchnorm_names(torch.nn.BatchNorm1d(3)) == set(torch.nn.BatchNorm1d(3).state_dict())


def test_group_norm_models_share_names_with_batch_norm_models():
    batch = dict(build("resnet8", classes=2, image_size=32, seed=0).named_parameters())
    group = dict(build("resnet8-gn", classes=2, image_size=32, seed=0).named_parameters())
    assert list(batch) == list(group)
    assert (
        build("resnet8", classes=2, image_size=32, seed=0, norm="group").state_dict().keys() == group.keys()
    )


@pytest.mark.parametrize("name", ["cnn", "vgg9"])
def test_plain_layers_chain(name):
    """Each layer's inputs are the previous layer's outputs (times the grid at the flattening), for FedMA."""
    model = build(name, classes=3, image_size=28, seed=0)
    assert isinstance(model, PlainCNN)
    layers = [layer for _, layer in model.layers()]
    for before, after in pairwise(layers):
        flattened = before.weight.ndim == 4 and after.weight.ndim == 2
        assert after.weight.shape[1] == before.weight.shape[0] * (model.grid**2 if flattened else 1)
    assert layers[-1] is model.head


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"name": "resnet9"}, "resnet8"),
        ({"norm": "layer"}, "norm"),
        ({"name": "cnn", "norm": "group"}, "normalisation"),
        ({"classes": 0}, "at least 1 output"),
        ({"channels": 0}, "channel"),
        ({"image_size": 7}, "7 pixels"),
    ],
)
def test_bad_requests(change, word):
    arguments = {"name": "resnet8", "classes": 2, "image_size": 32, "seed": 0, **change}
    with pytest.raises(FedLDError, match=word):
        build(**arguments)


def test_batchnorm_models_train_as_views_of_a_flat_vector():
    """Running statistics that share a version counter would break each other's backward pass."""
    model = build("resnet8", classes=2, image_size=16, seed=0).train()
    flat = FlatModel(model, Layout.of(model))
    before = flat.vector.clone()
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
    assert flat.gradient.abs().sum() > 0
    assert not torch.equal(flat.layout.shared_buffers(flat.vector), flat.layout.shared_buffers(before))


def test_standardised_convolutions_ignore_scale_and_shift_of_a_filter():
    """Same names as the network with GroupNorm; a filter counts only up to its own scale and mean."""
    model = build("resnet8-gnws", classes=2, image_size=16, seed=0)
    plain = build("resnet8-gn", classes=2, image_size=16, seed=0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert batchnorm_names(model) == set()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before, other = model(images), plain(images)
    with torch.no_grad():
        for network in (model, plain):
            network.conv1.weight.mul_(3.0).add_(0.5)
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain(images), other, rtol=1e-2, atol=1e-2)
    w = model.conv1.weight.detach()
    filters = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
    expected = torch.nn.functional.conv2d(images, filters, padding=1)
    torch.testing.assert_close(model.conv1(images), expected)


def test_efficientnet_lite0_has_the_public_names_and_pads_as_its_weights_were_trained():
    net = build("efficientnet_lite0", classes=2, image_size=32, seed=0)
    state = net.state_dict()
    assert state["_blocks.15._project_conv.weight"].shape == (320, 1152, 1, 1)
    assert state["_blocks.3._depthwise_conv.weight"].shape == (144, 1, 5, 5)
    assert "_blocks.0._expand_conv.weight" not in state
    assert {"_conv_stem.weight", "_bn0.weight", "_conv_head.weight", "_bn1.bias", "_fc.weight"} <= set(state)
    conv = net.get_submodule("_conv_stem")
    torch.nn.init.zeros_(conv.weight)
    conv.weight.data[:, :, 2, 2] = 1.0
    image = torch.arange(16.0).view(1, 1, 4, 4).repeat(1, 3, 1, 1)
    padded = torch.nn.functional.pad(image, (0, 1, 0, 1))
    assert torch.equal(conv(image)[0, 0], 3 * padded[0, 0, 2::2, 2::2])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_depthwise_convolutions_of_small_maps_have_the_gradients_of_plain_ones(size, stride):
    torch.manual_seed(0)
    layer = DepthwiseConv2d(16, stride)
    plain = torch.nn.Conv2d(16, 16, 3, stride, padding=1, groups=16, bias=False).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 16, size, size).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = x.detach().double().requires_grad_()
    out, expected = layer(x), plain(exact)
    upstream = torch.randn(out.shape)
    out.backward(upstream)
    expected.backward(upstream.double())
    for ours, theirs in ((out, expected), (x.grad, exact.grad), (layer.weight.grad, plain.weight.grad)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_the_mean_over_maps_gives_a_channels_last_gradient_that_is_exact():
    torch.manual_seed(0)
    x = torch.randn(3, 16, 5, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact = x.detach().double().requires_grad_()
    strides: list[tuple[int, ...]] = []
    before = torch.nn.functional.relu6(x)
    out, expected = GlobalMean()(before), torch.nn.functional.relu6(exact).mean((2, 3))
    x.register_hook(lambda gradient: strides.append(gradient.stride()))
    upstream = torch.randn(out.shape)
    out.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)
    assert strides == [x.stride()]
