"""A model as one vector: names, order, private parts, and the same numbers as the model itself."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedld.layout import FlatModel, Layout
from fedld.models import batchnorm_names, build


def model() -> nn.Module:
    return build("resnet8", classes=3, image_size=16, seed=1)


def test_flatten_and_export_are_inverse():
    net = model()
    layout = Layout.of(net)
    exported = layout.export(layout.flatten(net))
    for name, tensor in net.state_dict().items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)


def test_the_flat_model_computes_what_the_model_computes():
    net, twin = model().double(), model().double()
    flat = FlatModel(twin, Layout.of(twin, batchnorm_names(twin)))
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(flat.model(images), net(images))
    net(images).square().sum().backward()
    flat.gradient.zero_()
    flat.model(images).square().sum().backward()
    for e in flat.layout.entries:
        if e.kind == "parameter":
            expected = dict(net.named_parameters())[e.name].grad
            torch.testing.assert_close(e.view(flat.gradient), expected)


def test_private_entries_lie_behind_the_shared_ones():
    net = model()
    private = batchnorm_names(net)
    layout = Layout.of(net, private)
    assert {e.name for e in layout.entries if e.private} == private
    for e in layout.entries:
        inside = e.start < layout.shared or layout.trainable <= e.start < layout.shared_end
        assert inside != e.private
    assert sum(size for _, size in layout.tensors) == layout.shared


def test_private_part_goes_out_and_back():
    net = model()
    layout = Layout.of(net, batchnorm_names(net))
    vector = torch.arange(float(layout.size))
    part = layout.private_part(vector)
    other = torch.zeros(layout.size)
    layout.set_private(other, part)
    assert torch.equal(layout.private_part(other), part)
    assert torch.all(other[: layout.shared] == 0)


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=6))
def test_buffers_are_averaged_and_counters_keep_the_maximum(counts):
    net = nn.BatchNorm1d(2)
    layout = Layout.of(net)
    rows = []
    for count in counts:
        net.running_mean.fill_(float(count))
        net.num_batches_tracked.fill_(count)
        rows.append(layout.shared_buffers(layout.flatten(net)))
    p = torch.full((len(counts),), 1 / len(counts), dtype=torch.float64)
    vector = torch.zeros(layout.size)
    mean = layout.count_batches(p.double() @ torch.stack(rows).double(), torch.stack(rows))
    layout.shared_buffers(vector).copy_(mean)
    exported = layout.export(vector)
    assert exported["num_batches_tracked"].item() == max(counts)
    torch.testing.assert_close(
        exported["running_mean"][0].item(), sum(counts) / len(counts), rtol=1e-5, atol=0
    )


def test_an_update_applied_gives_the_shared_part_of_the_trained_model():
    net = model()
    layout = Layout.of(net, [*batchnorm_names(net), "fc.weight"])
    before, after = torch.rand(layout.size), torch.rand(layout.size)
    vector, update = before.clone(), layout.update(after, before)
    layout.apply(vector, update)
    torch.testing.assert_close(layout.shared_part(vector), layout.shared_part(after))
    assert torch.equal(layout.private_part(vector), layout.private_part(before))
    assert (layout.shared_size, layout.private_size) == (
        len(layout.shared_part(vector)),
        len(layout.private_part(vector)),
    )
    layout.set_shared(before, layout.shared_part(after))
    layout.set_private(before, layout.private_part(after))
    assert torch.equal(before, after)
