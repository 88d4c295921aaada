"""What a loss may ask for beside logits and labels, and that nothing is computed unasked."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedld.errors import FedLDError
from fedld.layout import FlatModel, Layout
from fedld.local import Context, ContextObjective, LocalClient, Objective, Samples, Training, as_objective
from fedld.models import build


def samples(count=23, size=8):
    images = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    return Samples(images, labels, np.arange(count), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def client(model, **setting):
    flat = FlatModel(model, Layout.of(model))
    return LocalClient(
        name="a",
        round=4,
        flat=flat,
        samples=samples(),
        training=Training(epochs=1, batch_size=5, lr=0.05, momentum=0.0, **setting),
        seed=3,
    )


@pytest.fixture
def resnet():
    return build("resnet8", classes=3, image_size=8, seed=0)


def passes(model):
    """Counts forward passes through the first and the last layer."""
    seen = Counter()
    model.conv1.register_forward_hook(lambda *_: seen.update(["trunk"]))
    model.fc.register_forward_hook(lambda *_: seen.update(["head"]))
    return seen


def test_a_plain_objective_costs_one_pass(resnet):
    one, seen = client(resnet), passes(resnet)
    one.train(Objective().loss)
    assert seen == {"trunk": one.steps, "head": one.steps}


def test_features_and_logits_come_from_one_pass(resnet):
    one, seen = client(resnet), passes(resnet)

    def loss(context):
        assert context.features.shape == (len(context.labels), resnet.fc.in_features)
        assert torch.equal(context.logits, F.linear(context.features, resnet.fc.weight, resnet.fc.bias))
        return F.cross_entropy(context.logits, context.labels) + context.features.square().mean()

    one.train(loss)
    assert seen == {"trunk": one.steps, "head": one.steps}


@pytest.mark.parametrize("setting", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_the_teacher_is_the_incoming_model_in_eval_mode(resnet, setting):
    """Its logits stay those of the incoming model while the client moves, and training is not disturbed."""
    one, twin = (
        client(resnet, **setting),
        client(build("resnet8", classes=3, image_size=8, seed=0), **setting),
    )
    reference = build("resnet8", classes=3, image_size=8, seed=0).eval()

    def distilled(context):
        logits = context.logits
        with torch.no_grad():
            expected = reference(context.images)
        torch.testing.assert_close(context.teacher.logits, expected.float(), rtol=0, atol=0)
        assert not context.teacher.features.requires_grad
        assert all(module.training for module in resnet.modules())
        return F.cross_entropy(logits, context.labels) + 0 * context.teacher.logits.sum()

    one.train(distilled)
    twin.train(Objective().loss)
    assert torch.equal(one.flat.vector, twin.flat.vector)
    assert not torch.equal(one.flat.vector, one.incoming)


def test_gradients_of_a_teacher_asked_for_before_the_backward_pass_are_the_students(resnet):
    one = client(resnet)
    images, labels = one.samples.batch(slice(0, 5))
    one.flat.vector.mul_(1.1)  # the client has moved since the model came in
    gradients = []
    for weight in (0.0, 1.0):
        context = one.context(images, labels)
        student = context.logits
        target = context.teacher.logits if weight else torch.zeros_like(student)
        parameters = list(resnet.parameters())
        gradients.append(torch.autograd.grad((student - weight * target).sum(), parameters))
    for plain, taught in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, taught)


def test_counts_and_round(resnet):
    one = client(resnet)
    context = one.context(*one.samples.batch(slice(0, 5)))
    assert context.class_counts.tolist() == [12.0, 11.0, 0.0]
    assert context.round == 4


def test_other_weights_and_other_logits(resnet):
    one = client(resnet)
    context = one.context(*one.samples.batch(slice(0, 5)))
    assert not context.seen_by(torch.zeros_like(one.incoming)).logits.any()
    other = context.with_logits(torch.ones(5, 3))
    assert Objective().loss(other).item() == pytest.approx(torch.log(torch.tensor(3.0)).item())
    assert not torch.equal(context.logits, other.logits)


def test_a_network_without_parts_has_logits_and_a_teacher_but_no_features():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    one = client(model)
    context = one.context(*one.samples.batch(slice(0, 5)))
    torch.testing.assert_close(context.teacher.logits, context.logits)
    with pytest.raises(FedLDError, match="features and a head are needed, which Sequential"):
        _ = context.features


@dataclass(frozen=True)
class Balanced(ContextObjective):
    def loss(self, context):
        return F.cross_entropy(context.logits + context.class_counts.clamp(min=1).log(), context.labels)


def test_functions_become_objectives(resnet):
    one = client(resnet)
    context = one.context(*one.samples.batch(slice(0, 5)))
    plain = as_objective(F.cross_entropy)
    assert plain.loss(context) == plain(context.logits, context.labels) == Objective().loss(context)

    def informed(logits, labels, context: Context):
        return F.cross_entropy(logits + context.class_counts.clamp(min=1).log(), labels)

    assert as_objective(informed).loss(context) == Balanced().loss(context)
    assert as_objective(Balanced()) == Balanced()


@pytest.mark.parametrize("value", ["marg-log", lambda logits: logits.sum(), 3])
def test_what_is_no_objective_is_refused(value):
    with pytest.raises(FedLDError, match=r"takes \(logits, labels\) or"):
        as_objective(value)


def test_an_objective_that_needs_its_context_says_so():
    with pytest.raises(FedLDError, match="Balanced needs the client's context"):
        Balanced()(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long))
