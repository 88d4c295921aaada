"""Noisy steps: gradients of single samples against a plain loop, their bound, the noise, Poisson batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import nn
from torch.nn import functional as F

from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Objective, Samples, Training
from fedld.local.noise import KeyedRandom, key_of_seed
from fedld.local.objectives import MarginLog
from fedld.local.private import PrivateSteps
from fedld.models import build
from fedld.models.standardise import StandardisedLinear

EXACT = PrivateSteps(noise=0.0, clip=1e6, rate=0.5, steps=3)


def samples(count=40, size=8):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    return Samples(images, labels, np.arange(count), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def flat_model(name="resnet8-gn"):
    model = build(name, classes=2, image_size=8, seed=0)
    return FlatModel(model, Layout.of(model))


def random(seed=0):
    return KeyedRandom(key_of_seed(seed), "test")


def of_logits(logits, images, labels):
    return F.cross_entropy(logits, labels)


def clipped_one_by_one(flat, batch, clip):
    """The same sum by a plain backward pass for each sample."""
    total = torch.zeros_like(flat.gradient)
    for image, label in zip(*batch, strict=True):
        flat.gradient.zero_()
        F.cross_entropy(flat.model(image[None]), label[None]).backward()
        total += flat.gradient * min(1.0, clip / float(flat.gradient.norm()))
    return total


@pytest.mark.parametrize("name", ["cnn", "resnet8-gn"])
@pytest.mark.parametrize("clip", [1e6, 0.5])
def test_clipped_gradients_are_those_of_single_samples(name, clip):
    flat = flat_model(name)
    batch = samples().batch(slice(0, 7))
    expected = clipped_one_by_one(flat, batch, clip) / (0.5 * 40)
    replace(EXACT, clip=clip).gradient(flat, of_logits, batch, 40, random())
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-3, atol=1e-5)


def test_more_samples_than_a_chunk_are_all_counted(monkeypatch):
    flat = flat_model("cnn")
    batch = samples().batch(slice(0, 7))
    EXACT.gradient(flat, of_logits, batch, 40, random())
    whole = flat.gradient.clone()
    monkeypatch.setattr("fedld.local.private.CHUNK", 3)
    EXACT.gradient(flat, of_logits, batch, 40, random())
    torch.testing.assert_close(flat.gradient, whole)


@pytest.mark.parametrize("factor", [1.0, 1e8, float("inf"), float("nan")])
def test_one_record_moves_the_sum_by_at_most_the_clipping_length(factor):
    """Also a record with an enormous, an infinite or an undefined gradient."""
    flat = flat_model("cnn")
    images, labels = samples().batch(slice(0, 6))
    private = replace(EXACT, clip=0.3)
    private.gradient(flat, of_logits, (images[:5], labels[:5]), 40, random())
    without = flat.gradient.clone()
    images = images.clone()
    images[5] *= factor
    private.gradient(flat, of_logits, (images, labels), 40, random())
    moved = float((flat.gradient - without).norm()) * 0.5 * 40
    assert moved <= 0.3


def test_the_noise_has_the_deviation_that_is_accounted_for_also_on_an_empty_batch():
    flat = flat_model("cnn")
    private = PrivateSteps(noise=2.0, clip=0.5, rate=0.1, steps=1)
    empty = samples().batch(torch.zeros(0, dtype=torch.int64))
    private.gradient(flat, of_logits, empty, 40, random(1))
    expected = 2.0 * 0.5 / (0.1 * 40)
    assert float(flat.gradient.std()) == pytest.approx(expected, rel=5 / len(flat.gradient) ** 0.5)
    assert abs(float(flat.gradient.mean())) < 5 * expected / len(flat.gradient) ** 0.5


def noise(size, seed=0):
    """What a step on no samples makes."""
    private = PrivateSteps(noise=1.5, clip=1.0, rate=1.0, steps=1)
    flat = FlatModel(model := nn.Linear(size, 1, bias=False), Layout.of(model))
    private.gradient(flat, of_logits, (torch.zeros(0, size), torch.zeros(0)), 1, random(seed))
    return flat.gradient


def test_numbers_of_the_key_stream_are_uniform_and_normal():
    assert kstest(random().uniform(200_000).numpy(), "uniform").pvalue > 0.01
    normal = random().normal(200_001).numpy()
    assert kstest(normal, "norm").pvalue > 0.01
    assert (np.abs(normal) > 4).sum() == pytest.approx(12.7, abs=12)  # the tail is there


def test_numbers_of_other_keys_purposes_and_steps_are_independent():
    keys = (key_of_seed(0), key_of_seed(1), bytes(32), bytes(31) + b"x")
    streams = [KeyedRandom(key, "a", step) for key in keys for step in (1, 2)]
    numbers = np.stack([stream.normal(100_000).numpy() for stream in streams])
    together = np.corrcoef(np.concatenate([numbers, numbers[:, ::-1]])) - np.eye(2 * len(streams))
    assert np.abs(together).max() < 5 / 100_000**0.5
    halves = numbers[0, :50_000], numbers[0, 50_000:]  # lengths and angles are shared by these
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / 50_000**0.5
    assert abs(np.corrcoef(*np.square(halves))[0, 1]) < 5 / 50_000**0.5
    assert torch.equal(random().normal(7), random().normal(7))


def test_the_noise_of_a_step_is_normal_and_that_of_its_seed():
    values = noise(100_000).numpy()
    assert kstest(values / 1.5, "norm").pvalue > 0.01
    assert np.array_equal(values, noise(100_000).numpy())
    assert abs(np.corrcoef(values, noise(100_000, seed=1).numpy())[0, 1]) < 5 / 100_000**0.5


@pytest.mark.parametrize("value", [0.0, 1 / 3, 1e-5, 1e-17, -700.1])
def test_the_lowest_bits_of_a_noisy_sum_tell_nothing_of_the_sum(value):
    """Every sum gives multiples of one grid, and another sum gives the same ones, moved by a multiple."""
    private = PrivateSteps(noise=1.3, clip=0.7, rate=1.0, steps=1)
    given = private.noisy(torch.full((5000,), value, dtype=torch.float64), random()) / private.grid
    zero = private.noisy(torch.zeros(5000), random()) / private.grid
    assert torch.equal(given, given.round())
    assert torch.equal(given - zero, torch.full((5000,), round(value / private.grid), dtype=torch.float64))


def test_every_step_takes_every_sample_independently_with_the_same_probability():
    private = PrivateSteps(noise=1.0, clip=1.0, rate=0.2, steps=2000)
    taken = torch.zeros(2000, 10)
    source = samples(10)

    class Positions(Samples):
        def __init__(self):
            self.labels = source.labels

        def __len__(self):
            return 10

        def batch(self, which):
            return which, which

    for step, (which, _) in enumerate(private.batches(Positions(), random())):
        taken[step, which] = 1
    assert (taken.mean(0) - 0.2).abs().max() < 5 * (0.16 / 2000) ** 0.5
    sizes = taken.sum(1)
    assert float(sizes.var()) == pytest.approx(10 * 0.16, rel=0.2)
    correlation = np.corrcoef(taken.numpy().T) - np.eye(10)
    assert np.abs(correlation).max() < 5 / 2000**0.5


def test_the_loop_takes_noisy_steps_and_tells_no_loss():
    flat = flat_model("cnn")
    private = PrivateSteps(noise=0.5, clip=1.0, rate=0.25, steps=4)
    training = Training(epochs=1, batch_size=10, lr=0.05, momentum=0.9, weight_decay=0.01, private=private)
    client = LocalClient(name="a", round=1, flat=flat, samples=samples(), training=training, seed=3)
    client.train(MarginLog(0.1).loss)
    reply = client.reply()
    assert reply.metrics["steps"] == 4
    assert np.isnan(reply.metrics["train_loss"])
    assert torch.isfinite(reply.update).all()
    assert float(reply.update.norm()) > 0


def test_without_noise_and_with_all_samples_it_is_gradient_descent():
    one, other = flat_model("cnn"), flat_model("cnn")
    all_of_them = PrivateSteps(noise=0.0, clip=1e6, rate=1.0, steps=3)
    start = Training(epochs=3, batch_size=40, lr=0.05, momentum=0.5)
    for flat, training in ((one, replace(start, private=all_of_them)), (other, start)):
        LocalClient(name="a", round=1, flat=flat, samples=samples(), training=training, seed=3).train(
            Objective().loss
        )
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-3, atol=1e-5)


def test_only_the_named_parameters_move():
    flat = flat_model("cnn")
    before = flat.weights.clone()
    training = Training(
        epochs=1,
        batch_size=10,
        lr=0.05,
        momentum=0.0,
        private=PrivateSteps(noise=1.0, clip=1.0, rate=0.25, steps=2),
    )
    last = [name for name, _ in flat.model.named_parameters()][-1]
    LocalClient(name="a", round=1, flat=flat, samples=samples(), training=training, seed=3).train(
        Objective().loss, only=[last]
    )
    entry = next(entry for entry in flat.layout.entries if entry.name == last)
    moved = (flat.weights != before).nonzero().flatten()
    assert len(moved) == entry.size
    assert isinstance(flat.model, nn.Module)


def head(kind=nn.Linear):
    torch.manual_seed(0)
    model = nn.Sequential(kind(12, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    if kind is StandardisedLinear:
        model[0].shift.fill_(0.3)
        model[0].scale.fill_(2.0)
    return FlatModel(model, Layout.of(model))


def features():
    torch.manual_seed(1)
    return torch.randn(7, 12), torch.arange(7) % 3


@pytest.mark.parametrize("kind", [nn.Linear, StandardisedLinear])
@pytest.mark.parametrize("clip", [1e6, 0.4])
def test_linear_layers_give_the_same_gradients_without_those_of_single_samples(monkeypatch, kind, clip):
    flat = head(kind)
    expected = clipped_one_by_one(flat, features(), clip) / (0.5 * 40)
    monkeypatch.setattr(PrivateSteps, "_add_clipped", None)
    replace(EXACT, clip=clip).gradient(flat, of_logits, features(), 40, random())
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [1e8, float("inf"), float("nan")])
def test_one_record_moves_linear_layers_by_at_most_the_clipping_length(factor):
    flat = head()
    images, labels = features()
    private = replace(EXACT, clip=0.3)
    private.gradient(flat, of_logits, (images[:6], labels[:6]), 40, random())
    without = flat.gradient.clone()
    images[6] *= factor
    private.gradient(flat, of_logits, (images, labels), 40, random())
    assert float((flat.gradient - without).norm()) * 0.5 * 40 <= 0.3


class Twice(nn.Module):
    """A layer that is used twice: the length of its gradient is no product."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


def test_a_layer_that_is_used_twice_is_clipped_by_its_whole_gradient():
    torch.manual_seed(0)
    flat = FlatModel(model := Twice(), Layout.of(model))
    expected = clipped_one_by_one(flat, features(), 0.4) / (0.5 * 40)
    replace(EXACT, clip=0.4).gradient(flat, of_logits, features(), 40, random())
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-4, atol=1e-6)
