"""Weights of classes: in the loss, in sampling, and at a site that hides small classes."""

import pytest
import torch
import torch.nn.functional as F

import fedld
from fedld.errors import FedLDError
from fedld.local.base import Context, Objective
from fedld.local.samples import ClassWeights, parse_class_weights
from fedld.seeds import torch_generator

LABELS = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)


def test_balanced_classes_have_equal_parts_of_the_loss():
    weights = ClassWeights((1.0,) * 3, balanced=True).of(LABELS)
    parts = weights * torch.bincount(LABELS)
    torch.testing.assert_close(parts, torch.full((3,), 100 / 3))


def test_a_class_of_few_samples_is_not_weighed_up():
    for weights in (ClassWeights((1.0,) * 3, balanced=True), ClassWeights((1.0, 1.0, 1e6))):
        found = weights.of(LABELS, smallest=20)
        assert found[2] == found.min()
    assert ClassWeights((1.0, 1.0, 1e6)).of(LABELS, smallest=1000).tolist() == [1, 1, 1]


def test_weights_by_name():
    assert parse_class_weights("none", ["a", "b"], "loss") is None
    assert parse_class_weights("b=3, a=0.5", ["a", "b"], "loss").weights == (0.5, 3.0)
    for text, problem in (
        ("c=1", "no class 'c'"),
        ("a=x", "number from 0"),
        ("a=-1", "number from 0"),
        ("", "class"),
    ):
        with pytest.raises(FedLDError, match=problem):
            parse_class_weights(text, ["a", "b"], "loss")


def test_the_loss_is_torchs_weighted_cross_entropy():
    logits, labels = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)), LABELS
    weights = ClassWeights((1.0,) * 3, balanced=True).of(labels)
    context = Context(
        flat=None,
        images=None,
        labels=labels,
        client_labels=labels,
        incoming=None,
        round=1,
        class_weights=weights,
    ).with_logits(logits)
    expected = F.cross_entropy(logits, labels, weight=weights)
    torch.testing.assert_close(Objective().loss(context), expected)


def rare_class():
    """Two clients with images of which every tenth is of the class '1', whose upper half is lighter."""
    images = torch.rand(400, 8, 8, 1, generator=torch_generator(0, "rare"))
    labels = (torch.arange(400) % 10 == 0).long()
    images[labels == 1, :4] += 0.25
    pixels, classes = (255 * images.clamp(max=1)).byte().numpy(), labels.numpy()
    halves = {"a": slice(0, 200), "b": slice(200, 400)}
    return fedld.Federation.from_arrays(
        {name: (pixels[part], classes[part]) for name, part in halves.items()}
    )


def shares_drawn(tmp_path, **settings):
    """The share of each class among the samples that entered the losses of a run."""
    seen = torch.zeros(2)

    def counting(logits, labels):
        seen.add_(torch.bincount(labels, minlength=2))
        return F.cross_entropy(logits, labels)

    shared = {"rounds": 1, "workers": 0, "local_epochs": 3}
    fedld.run("fedavg", rare_class(), objective=counting, out=tmp_path, **shared, **settings)
    return (seen / seen.sum()).tolist()


@pytest.mark.parametrize(
    ("weights", "share"), [("none", 0.1), ("balanced", 0.5), ("1=0", 0.0), ("1=3", 0.25)]
)
def test_sampling_draws_classes_by_their_weights(tmp_path, weights, share):
    drawn = shares_drawn(tmp_path, class_weights=weights, weigh="sampling")
    assert drawn[1] == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objective": "marg-log"}, "weigh = 'sampling'"),
        ({"method": "ridge", "train": "head"}, "solves its head from sums"),
        ({"class_weights": "eleven=2"}, "no class 'eleven'"),
    ],
)
def test_weights_that_would_be_ignored_are_refused(tmp_path, settings, problem):
    settings = {"class_weights": "balanced", **settings}
    with pytest.raises(FedLDError, match=problem):
        fedld.run(settings.pop("method", "fedavg"), "digits", rounds=1, workers=0, out=tmp_path, **settings)


def test_weighted_loss_helps_a_rare_class(tmp_path):
    """The mean of the classes' accuracies rises where one class is rare."""
    data = rare_class()
    plain, weighted = (
        fedld.run("fedavg", data, rounds=6, workers=0, lr=0.02, class_weights=kind, out=tmp_path / kind)
        for kind in ("none", "balanced")
    )
    key = "balanced_accuracy"
    assert weighted.rounds[-1]["test"][key] > plain.rounds[-1]["test"][key] + 0.05
