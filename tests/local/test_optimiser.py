"""The clients' optimisers against torch's own: clipping, rates of head and clients, kept moments."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedld
from fedld import FedLDError
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_training
from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Objective, Samples, Training
from fedld.local.client import accumulation
from fedld.local.optimiser import OptimiserSettings
from fedld.methods import METHODS
from fedld.models import build
from fedld.models.base import head_block_names
from fedld.records.schema import CLIENTS
from fedld.records.writer import read_lines

SETTINGS = {"dataset": "digits", "clients": 3, "rounds": 2, "workers": 0}


def client(**setting):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (23, 8, 8, 3), dtype=np.uint8)
    samples = Samples(images, np.arange(23) % 2, np.arange(23), (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    model = build("cnn", classes=2, image_size=8, seed=0)
    training = replace(Training(epochs=1, batch_size=5, lr=0.05, momentum=0.0), **setting)
    return LocalClient(
        name="a",
        round=1,
        flat=FlatModel(model, Layout.of(model, ())),
        samples=samples,
        training=training,
        seed=3,
    )


loss = Objective().loss


def trained(rounds=1, momentum=0.0, weight_decay=0.0, correction=None, **optimiser):
    """A client after some rounds, going on from its own model and state; and the batches that it saw."""
    settings = OptimiserSettings(**optimiser)
    setting = {"momentum": momentum, "weight_decay": weight_decay, "optimiser": settings}
    batches, one, state = [], client(**setting), {}

    def recorded(context):
        batches.append((context.images.clone(), context.labels))
        return loss(context)

    for k in range(rounds):
        one = LocalClient(
            name="a",
            round=k + 1,
            flat=one.flat,
            samples=one.samples,
            training=one.training,
            seed=3,
            state=state,
        )
        one.train(recorded, correction=correction)
        state = one.reply().state
    return one, batches


def reference(make, batches, clip=None):
    """The same batches through an optimiser of torch."""
    twin = build("cnn", classes=2, image_size=8, seed=0)
    optimiser = make(twin)
    for images, labels in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(images), labels).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        optimiser.step()
    return dict(twin.named_parameters())


def same(one, parameters):
    for name, parameter in one.model.named_parameters():
        # Adam divides by small numbers: what rounding changes grows.
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-3, atol=1e-4)


MADE = {
    "nesterov": lambda net: torch.optim.SGD(
        net.parameters(), 0.05, momentum=0.9, weight_decay=0.01, nesterov=True
    ),
    "adam": lambda net: torch.optim.Adam(net.parameters(), 0.05, weight_decay=0.01),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.05, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("corrected", [False, True])
def test_the_loop_is_torchs_optimiser(kind, corrected):
    """Also with a correction that changes nothing: weight decay then enters before it, or stays apart."""
    nothing = (lambda weights, gradient: None) if corrected else None
    one, batches = trained(kind=kind, momentum=0.9, weight_decay=0.01, correction=nothing)
    same(one, reference(MADE[kind], batches))


def test_a_gradient_is_clipped_by_its_length():
    one, batches = trained(clip=0.1)
    same(one, reference(lambda net: torch.optim.SGD(net.parameters(), 0.05), batches, clip=0.1))


def test_the_head_has_a_rate_of_its_own():
    one, batches = trained(kind="adamw", head_lr=0.5)

    def make(net):
        names = head_block_names(net)
        assert len(names) == 2
        head = [p for name, p in net.named_parameters() if name in names]
        rest = [p for name, p in net.named_parameters() if name not in names]
        groups = [{"params": rest}, {"params": head, "lr": 0.5}]
        return torch.optim.AdamW(groups, 0.05, weight_decay=0.0)

    same(one, reference(make, batches))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_moments_are_reset_in_every_round_or_kept(kind):
    made = {
        "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
        "adam": lambda net: torch.optim.Adam(net.parameters(), 0.05),
    }
    kept, batches = trained(rounds=2, kind=kind, momentum=0.9, keeps_moments=True)
    same(kept, reference(made[kind], batches))  # one long run of torch's optimiser
    reset, _ = trained(rounds=2, kind=kind, momentum=0.9)
    assert not torch.allclose(kept.weights, reset.weights)


def test_nesterovs_gradients_have_these_weights():
    """All gradients equal to 1: the way is the rate times the sum of their weights."""
    weights, momentum = torch.zeros(1), 0.6
    optimiser = torch.optim.SGD([weights], 1.0, momentum=momentum, nesterov=True)
    for _ in range(5):
        weights.grad = torch.ones(1)
        optimiser.step()
    assert -weights.item() == pytest.approx(accumulation(5, momentum, nesterov=True))


@pytest.mark.parametrize(
    "settings", [{"optimiser": "adamw", "lr": 0.002}, {"head_lr": 0.1}, {"moments": "kept"}]
)
def test_a_control_variate_is_the_mean_gradient_whatever_the_optimiser(settings, monkeypatch):
    """In the first round c = c_i = 0: the new c_i is the mean of the gradients of all steps."""
    seen = []
    method = METHODS["scaffold"]
    training = make_training(make_experiment({"method": "scaffold", "momentum": 0.5, **settings}))
    one = client(lr=training.lr, momentum=0.5, optimiser=training.optimiser)
    one.message["c"] = torch.zeros_like(one.weights)
    original = LocalClient._gradient

    def recorded(self, *given):
        value = original(self, *given)
        seen.append(self.flat.gradient.clone())
        return value

    monkeypatch.setattr(LocalClient, "_gradient", recorded)
    reply = method.client_update(one)
    torch.testing.assert_close(reply.state["c_i"], torch.stack(seen).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{"optimiser": "adam"}, {"head_lr": 0.1}, {"moments": "kept"}])
def test_fedcm_says_why_it_needs_plain_steps(settings):
    ((key, value),) = settings.items()
    with pytest.raises(FedLDError, match=f"method 'fedcm' cannot be trained with {key} = {value!r}: Delta"):
        make_experiment({"method": "fedcm", **settings})
    make_experiment({"method": "fedcm", "optimiser": "nesterov"})


def test_adam_steps_count_as_one_each_for_fednova(tmp_path):
    result = fedld.run("fednova", out=tmp_path / "run", **_on_digits(optimiser="adamw", lr=0.002))
    assert result.rounds[-1]["test"]["accuracy"] is not None
    assert make_training(make_experiment({"optimiser": "adam"})).accumulation(7) == 7.0


def test_clients_have_rates_of_their_own(tmp_path):
    fedld.run(out=tmp_path / "run", **_on_digits(client_lr={"client_2": 0.01}, lr=0.1))
    rates = {line["client"]: line["lr"] for line in read_lines(tmp_path / "run", CLIENTS)}
    assert rates == {"client_1": 0.1, "client_2": 0.01, "client_3": 0.1}
    with pytest.raises(FedLDError, match="client_lr names no client with 'client_9'"):
        fedld.run(**_on_digits(client_lr={"client_9": 0.1}))


def halved(round_):
    return 0.5**round_


def test_a_schedule_is_a_function_of_the_round(tmp_path):
    fedld.run(out=tmp_path / "run", **_on_digits(lr_schedule=halved, lr=0.1))
    assert [line["lr"] for line in read_lines(tmp_path / "run", CLIENTS)][::3] == [0.05, 0.025]
    with pytest.raises(FedLDError, match=r"lr_schedule gave 0.0 in round 1"):
        make_experiment({"lr_schedule": lambda round_: 0})
    with pytest.raises(FedLDError, match="unknown lr_schedule 'cosin': did you mean 'cosine'"):
        make_experiment({"lr_schedule": "cosin"})


@pytest.mark.parametrize("method", ["fedpac", "ditto", "feddyn", "fedbn", "scaffold"])
def test_kept_moments_survive_a_resumption(method, tmp_path):
    """Methods that train in parts, or two models, keep the moments of each."""
    settings = _on_digits(moments="kept", optimiser="adam", lr=0.002, model="resnet8")
    whole = fedld.run(method, out=tmp_path / "whole", **(settings | {"rounds": 3}))
    fedld.run(method, out=tmp_path / "parts", **settings)
    from fedld.engine.loop import resume

    resume(tmp_path / "parts", rounds=3)
    for name in ("model.safetensors",):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.rounds[-1]["round"] == 3


def _on_digits(**changes):
    settings = {key: value for key, value in SETTINGS.items() if key != "dataset"} | changes
    return {"federation": "digits", **settings}


def test_a_network_without_a_named_head_has_no_head_lr():
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(FedLDError, match="head_lr needs a network that names its head"):
        fedld.run(model=own, **_on_digits(head_lr=0.1))


def test_nesterov_needs_momentum():
    with pytest.raises(FedLDError, match="needs a momentum above 0"):
        make_experiment({"optimiser": "nesterov", "momentum": 0.0})


def test_a_methods_own_option_wins_over_the_setting_of_that_name():
    from fedld.study.compare import for_method

    assert for_method({}, "fedpac", {"head_lr": 0.3})["method"] == {"name": "fedpac", "head_lr": 0.3}
    assert for_method({}, "fedavg", {"head_lr": 0.3})["head_lr"] == 0.3
