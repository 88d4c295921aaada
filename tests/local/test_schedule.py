from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedld.config.experiment import make_experiment
from fedld.engine.jobs import Parts
from fedld.errors import FedLDError
from fedld.local.optimiser import Schedule

KINDS = st.sampled_from(["constant", "cosine", "step"])


@given(KINDS, st.integers(1, 60), st.data())
def test_a_rate_grows_in_the_warm_up_then_never_again(kind, rounds, data):
    warmup = data.draw(st.integers(0, rounds - 1))
    schedule = Schedule(
        kind=kind, rounds=rounds, warmup=warmup, every=data.draw(st.integers(1, 9)), decay=0.5
    )
    factors = [schedule.factor(round_) for round_ in range(1, rounds + 1)]
    assert factors[: warmup + 1] == sorted(set(factors[: warmup + 1]))
    assert factors[warmup] == 1
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(factor > 0 for factor in factors)


def test_cosine_is_half_way_in_the_middle():
    assert Schedule(kind="cosine", rounds=10).factor(6) == pytest.approx(0.5)


def test_a_round_trains_at_its_rate():
    experiment = make_experiment({"rounds": 4, "lr": 0.2, "lr_schedule": "step", "lr_step": 1})
    found = [Parts.of(experiment).training_in(round_, "client_1") for round_ in (1, 2, 3)]
    assert [t.lr * t.factor for t in found] == pytest.approx([0.2, 0.02, 0.002])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"local_steps": 5, "local_epochs": 2}, "exclude each other"),
        ({"local_steps": 0}, "local_steps"),
        ({"lr_schedule": "cosin"}, "lr_schedule"),
        ({"lr_warmup": 15}, "none of 15 rounds"),
        ({"lr_decay": 0.0}, "lr_decay"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(FedLDError, match=words):
        make_experiment(settings)


def test_settings_survive_being_saved():
    import tomllib

    experiment = make_experiment({"local_steps": 7, "lr_schedule": "cosine", "lr_warmup": 2})
    assert make_experiment(tomllib.loads(experiment.to_toml())) == experiment


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_steps_are_counted_across_epochs(client, steps):
    """Three batches per epoch: eight steps are two epochs and two batches of a third."""
    trained = client(batch_size=4, steps=steps)
    trained.train(lambda context: context.logits.square().mean())
    assert trained.steps == steps
    assert trained.loss_count == sum([4, 4, 4, 4, 4, 4, 4, 4][:steps])


def test_the_factor_scales_every_rate(client):
    """One step at half the rate is half the step, also where a method gives a rate of its own."""
    for own in (None, 0.3):
        moved = []
        for factor in (1.0, 0.5):
            trained = client(batch_size=50, factor=factor)
            trained.train(lambda context: context.logits.square().mean(), lr=own)
            moved.append(trained.weights - trained.incoming[: len(trained.weights)])
            assert trained.reply().metrics["lr"] == 0.05 * factor
        torch.testing.assert_close(moved[1], moved[0] / 2)


@pytest.fixture
def client():
    """A linear model on twelve samples."""
    import numpy as np

    from fedld.layout import FlatModel, Layout
    from fedld.local import FeatureSamples, LocalClient, Training

    def make(**setting):
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Linear(3, 2)
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3, generator=generator))
            model.bias.zero_()
        values = torch.randn(12, 3, generator=generator).numpy()
        samples = FeatureSamples(values, np.arange(12) % 2, np.arange(12))
        training = replace(Training(epochs=1, batch_size=5, lr=0.05, momentum=0.0), **setting)
        return LocalClient(
            name="a",
            round=1,
            flat=FlatModel(model, Layout.of(model)),
            samples=samples,
            training=training,
            seed=0,
        )

    return make
