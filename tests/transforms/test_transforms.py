"""Transforms by themselves: what they send, what comes back, and what is refused."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedld.errors import FedLDError
from fedld.layout import Layout
from fedld.transforms import Chain, Clip, Quantise, Sender, TopK, UpdateTransform, make_transform

LAYOUT = Layout.of(nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30)))


def sender(round_=1, client="a", state=None):
    return Sender(client=client, round=round_, seed=3, layout=LAYOUT, state=state or {})


def update(seed=0):
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


def sent(chain, vector, **facts):
    message, kept = chain.encode(vector, sender(**facts))
    return chain.decode(message, LAYOUT), kept, sum(t.numel() * t.element_size() for t in message.values())


def test_clip_bounds_the_parameters_alone():
    found, kept, _ = sent(Chain([Clip(0.5)]), update())
    assert found["parameters"].norm() == pytest.approx(0.5)
    assert torch.equal(found["buffers"], LAYOUT.shared_buffers(update()))
    assert not kept
    short = sent(Chain([Clip(1e9)]), update())[0]
    assert torch.equal(short["parameters"], LAYOUT.shared_parameters(update()))


@pytest.mark.parametrize(("bits", "levels"), [(8, 256), (4, 16), (2, 4)])
def test_quantise_has_so_many_levels_and_bytes(bits, levels):
    found, _, size = sent(Chain([Quantise(bits)]), update())
    for part in found["parameters"].split([length for _, length in LAYOUT.tensors]):
        assert len(part.unique()) <= levels
    plain = 4 * LAYOUT.shared
    buffers = 4 * (LAYOUT.shared_end - LAYOUT.trainable)
    assert size - buffers - 8 * len(LAYOUT.tensors) == -(-plain * bits // 32)
    error = (found["parameters"] - LAYOUT.shared_parameters(update())).abs().max()
    assert error <= 2 * update().abs().max() / (levels - 1) + 1e-6


def test_quantise_is_unbiased_and_depends_on_round_and_client():
    chain, true = Chain([Quantise(2)]), LAYOUT.shared_parameters(update())
    draws = [sent(chain, update(), round_=k)[0]["parameters"] for k in range(1, 401)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], sent(chain, update(), client="b")[0]["parameters"])
    assert torch.equal(draws[0], sent(chain, update())[0]["parameters"])
    assert (torch.stack(draws).mean(0) - true).abs().max() < 0.35


@pytest.mark.parametrize("transform", [Quantise(2), TopK(0.02)])
def test_what_is_lost_comes_with_the_next_update(transform):
    """Error feedback: the sum of what arrived differs from the sum of what was sent by the last residual."""
    chain, state, arrived = Chain([transform]), {}, torch.zeros(LAYOUT.shared)
    for round_ in range(1, 31):
        found, state, _ = sent(chain, update(round_), round_=round_, state=state)
        arrived += found["parameters"]
    true = sum(LAYOUT.shared_parameters(update(k)) for k in range(1, 31))
    torch.testing.assert_close(arrived + state["transform.0.residual"], true, rtol=1e-4, atol=1e-4)


def test_topk_sends_the_largest_numbers():
    found, _, size = sent(Chain([TopK(0.1)]), update())
    parameters = LAYOUT.shared_parameters(update())
    kept = found["parameters"] != 0
    assert kept.sum() == -(-len(parameters) // 10)
    assert parameters[kept].abs().min() >= parameters[~kept].abs().max()
    assert size == 8 * int(kept.sum()) + 4 * (LAYOUT.shared_end - LAYOUT.trainable)


def test_a_chain_goes_back_in_reverse_order():
    both = sent(Chain([Clip(0.5), Quantise(8)]), update())[0]["parameters"]
    assert both.norm() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("text", ["clip", "clip:0", "clip:x", "quantise:3", "topk:2", "gzip"])
def test_wrong_transforms_are_refused_in_a_sentence(text):
    with pytest.raises(FedLDError, match="transform"):
        make_transform(text)


def test_two_that_do_not_fit_together_are_refused():
    with pytest.raises(FedLDError, match="quantise, topk do not fit together"):
        Chain([Quantise(), TopK()]).check(LAYOUT)


@dataclass(frozen=True)
class Hidden(UpdateTransform):
    name = "hidden"
    sums_only = True


def test_a_transform_of_sums_comes_last():
    Chain([Clip(1.0), Hidden()]).check(LAYOUT)
    with pytest.raises(FedLDError, match="'hidden' shows the server sums alone: put it last"):
        Chain([Hidden(), Clip(1.0)]).check(LAYOUT)


def test_a_message_of_another_form_is_refused():
    chain = Chain([TopK(0.1)])
    template = chain.template(LAYOUT)
    chain.check_message(template, template)
    with pytest.raises(FedLDError, match="another form"):
        chain.check_message({**template, "values": torch.zeros(2)}, template)
    with pytest.raises(FedLDError, match="places that the model does not have"):
        chain.decode({**template, "places": template["places"] + 10**6}, LAYOUT)
