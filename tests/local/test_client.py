"""The one SGD loop, the reply, and the batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Objective, Samples, Training
from fedld.models import build


def samples(count=23, size=8):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    labels = np.arange(count, dtype=np.int64) % 2
    return Samples(images, labels, np.arange(count), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))


def client(model=None, private=(), round_=1, **setting):
    model = model or build("cnn", classes=2, image_size=8, seed=0)
    flat = FlatModel(model, Layout.of(model, private))
    training = replace(Training(epochs=1, batch_size=5, lr=0.05, momentum=0.0), **setting)
    return LocalClient(name="a", round=round_, flat=flat, samples=samples(), training=training, seed=3)


loss = Objective().loss


@pytest.mark.parametrize("setting", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"epochs": 3}])
def test_the_loop_is_plain_sgd(setting):
    """The same batches through torch.optim.SGD on ordinary parameters give the same model."""
    one, twin = client(**setting), build("cnn", classes=2, image_size=8, seed=0)
    batches = []

    def recorded(context):
        batches.append((context.images.clone(), context.labels))
        return loss(context)

    one.train(recorded)
    momentum, decay = setting.get("momentum", 0.0), setting.get("weight_decay", 0.0)
    optimiser = torch.optim.SGD(twin.parameters(), 0.05, momentum=momentum, weight_decay=decay)
    for images, labels in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(images), labels).backward()
        optimiser.step()
    assert len(batches) == one.steps == 5 * setting.get("epochs", 1)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(dict(one.model.named_parameters())[name], parameter)


def test_only_the_named_parameters_move():
    one = client(momentum=0.5, weight_decay=0.1)
    one.train(loss, only=["classifier.2.weight"])
    moved = one.layout.views(one.flat.vector - one.incoming)
    assert [name for name, change in moved.items() if change.any()] == ["classifier.2.weight"]
    assert all(parameter.requires_grad for parameter in one.model.parameters())


def test_a_correction_edits_the_gradient():
    one = client()
    one.train(loss, correction=lambda weights, gradient: gradient.zero_())
    assert torch.equal(one.flat.vector, one.incoming)


def test_training_depends_on_seed_and_round_and_leaves_the_global_generator_alone():
    def noisy(context):
        noise = 0.1 * torch.randn_like(context.images)
        return loss(replace(context, images=context.images + noise))

    results = []
    for state, round_ in ((1, 1), (2, 1), (1, 2)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        one = client(round_=round_)
        one.train(noisy)
        assert torch.equal(before, torch.get_rng_state())
        results.append(one.flat.vector.clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_the_reply_holds_differences_of_parameters_and_values_of_buffers():
    one = client(build("resnet8", classes=2, image_size=8, seed=0), private=["fc.weight"])
    one.train(loss)
    reply, layout = one.reply(state={"mine": torch.ones(2)}), one.layout
    torch.testing.assert_close(
        reply.update[: layout.shared], (one.flat.vector - one.incoming)[: layout.shared]
    )
    assert torch.equal(reply.update[layout.trainable :], one.flat.vector[layout.trainable :])
    assert torch.equal(reply.state["private"], layout.views(one.flat.vector)["fc.weight"].flatten())
    assert set(reply.state) == {"mine", "private"}
    assert reply.metrics["steps"] == 5
    assert reply.metrics["train_loss"] > 0


def test_frozen_buffers_stay_and_batchnorm_still_learns():
    one = client(build("resnet8", classes=2, image_size=8, seed=0), buffers="frozen")
    one.train(loss)
    change = one.layout.views(one.flat.vector - one.incoming)
    assert not change["bn1.running_mean"].any()
    assert change["bn1.weight"].any()


def test_an_epoch_sees_every_sample_once_and_no_batch_of_one():
    data = samples(21)
    sizes, labels = [], []
    for images, batch in data.shuffled(5, torch.Generator().manual_seed(0)):
        assert len(images) == len(batch)
        sizes.append(len(batch))
        labels += batch.tolist()
    assert sizes == [5, 5, 5, 6]
    assert sorted(labels) == sorted(data.labels.tolist())


def test_pixels_are_normalised():
    data = samples(4)
    images, _ = next(data.in_order(4))
    pixels = torch.from_numpy(np.asarray(data._images)).permute(0, 3, 1, 2) / 255
    expected = (pixels - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.2, 0.1]).view(
        3, 1, 1
    )
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-5)
