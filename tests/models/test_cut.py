import pytest
import torch

from fedld.errors import FedLDError
from fedld.models import NAMES, build, cut
from fedld.models.cut import CHUNK

IMAGES = torch.randn(CHUNK, 3, 32, 32, generator=torch.Generator().manual_seed(0)).contiguous(
    memory_format=torch.channels_last
)


def network(name="resnet8", head="linear"):
    return build(name, classes=3, image_size=32, seed=0, head=head).eval()


@pytest.mark.parametrize("train", ["head", "last:2"])
@pytest.mark.parametrize("head", ["linear", "mlp:4"])
@pytest.mark.parametrize("name", NAMES)
def test_trunk_and_tail_are_the_network(name, head, train):
    whole = network(name, head)
    trunk, tail = cut(network(name, head), train)
    torch.testing.assert_close(tail(trunk(IMAGES)), whole(IMAGES), rtol=1e-4, atol=1e-5)
    names = whole.state_dict().keys()
    assert [n for n in names if n in tail.state_dict()] == list(tail.state_dict())
    assert len(tail.state_dict()) + len(trunk.state_dict()) == len(names)


@pytest.mark.parametrize("name", ["cnn", "resnet8", "mobilenet_v2"])
def test_features_depend_on_neither_number_nor_neighbours(name):
    """What makes cached features equal, bit by bit, to those computed with a batch."""
    trunk, _ = cut(network(name), "head")
    features = trunk(IMAGES)
    for which in ([3], [5, 1], list(range(31, -1, -1)), [0, 7, 9] * 15):
        assert torch.equal(trunk(IMAGES[which]), features[which])


def test_a_trunk_stays_in_eval_mode_and_wants_no_gradient():
    trunk, tail = cut(network(), "last:2")
    before = {key: value.clone() for key, value in trunk.state_dict().items()}
    features = trunk.train()(IMAGES)
    assert not any(module.training for module in trunk.stack.modules())
    tail.train()(features).sum().backward()
    assert all(parameter.grad is None for parameter in trunk.parameters())
    assert all(torch.equal(before[key], value) for key, value in trunk.state_dict().items())


@pytest.mark.parametrize(
    ("train", "names"),
    [
        ("last:1", ["fc"]),
        ("fc", ["fc"]),
        ("layer2", ["layer2.0", "layer3.0", "fc"]),
        ("layer3.0", ["layer3.0", "fc"]),
    ],
)
def test_blocks_by_number_and_by_name(train, names):
    assert [block.name for block in cut(network(), train)[1].blocks] == names


@pytest.mark.parametrize("train", ["all", "last:5", "conv1"])
def test_nothing_is_frozen(train):
    trunk, tail = cut(network(), train)
    assert trunk is None
    assert tail.state_dict().keys() == network().state_dict().keys()


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("last:99", "5 blocks"),
        ("last:0", "5 blocks"),
        ("last:two", "5 blocks"),
        ("layer9", "did you mean 'layer"),
        ("haed", "did you mean 'head'"),
        ("", "names no block"),
    ],
)
def test_bad_cuts(train, words):
    with pytest.raises(FedLDError, match=words):
        cut(network(), train)


def test_a_module_that_names_no_blocks_cannot_be_cut():
    with pytest.raises(FedLDError, match="Linear does not name its blocks"):
        cut(torch.nn.Linear(2, 2), "head")


@pytest.mark.parametrize("head", ["mlp", "mlp:0", "mlp:-1", "mlp:x", "line", "mlp:99999999"])
def test_bad_heads(head):
    with pytest.raises(FedLDError, match=r"'mlp:N'"):
        network(head=head)


def test_the_digest_tells_trunks_apart():
    digests = {cut(network(), train)[0].digest for train in ("head", "last:2")}
    digests.add(cut(build("resnet8", classes=3, image_size=32, seed=1), "head")[0].digest)
    assert len(digests) == 3
    assert cut(network(), "head")[0].digest in digests
