"""What distinguishes each baseline: the line that makes it more than FedAvg."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.methods.conftest import Federation
from tests.methods.test_fixed_points import (  # noqa: F401 (`data` is a fixture)
    SIZES,
    TRAINING,
    data,
    distance,
    optimum,
    train,
)
from torch import nn

from fedld.config.experiment import make_experiment
from fedld.engine.loop import run
from fedld.layout import FlatModel, Layout
from fedld.local import Context, Objective
from fedld.local.objectives import (
    LogitAdjusted,
    LogitCalibrated,
    NotTrueDistilled,
    RestrictedSoftmax,
    correlation,
)
from fedld.methods import METHODS
from fedld.methods.averaging import FedExP, GeneralisationAdjustment
from fedld.methods.base import shares
from fedld.methods.ccvr import merged, virtual
from fedld.methods.feddyn import FedDyn
from fedld.methods.momentum import FedACG
from fedld.methods.personal import FedRoD
from fedld.methods.representation import Moon
from fedld.methods.sharpness import FedSAM, FedSpeed
from fedld.models import build
from fedld.records.schema import CROSS_LOSS, ROUNDS
from fedld.records.writer import read_lines


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_feddyn_removes_the_drift_of_unequal_clients(data, weights):  # noqa: F811
    """Its fixed point is the optimum for any number of steps, thanks to the server's h."""
    setting = {"weights": weights, "lr": 0.2, "rounds": 150}
    assert distance(FedDyn(alpha=0.3), data, **setting) < 1e-6
    assert distance(METHODS["fedavg"], data, **setting) > 1e-3


def test_fedexp_extrapolates_where_clients_pull_apart(softmax_regression):
    """Orthogonal updates of m clients: eta = m/2; equal updates: the plain average."""
    federation = softmax_regression(FedExP(epsilon=0.0))
    federation.round()
    apart = replace(federation.replies, updates=torch.eye(3, 15, dtype=torch.float64))
    alike = replace(federation.replies, updates=torch.ones(3, 15, dtype=torch.float64))
    for replies, eta in ((apart, 1.5), (alike, 1.0)):
        mean = federation.method.aggregate(replies).update
        assert federation.method.extrapolation(replies, mean) == pytest.approx(eta)
        server, combined = federation.method.server_update(federation.server, replies)
        torch.testing.assert_close(combined.update, eta * mean)
        assert combined.report.norm_ratio == pytest.approx(eta)
        torch.testing.assert_close(server.extra["iterate"], federation.server.extra["iterate"] + eta * mean)


def test_fedacg_starts_ahead_of_the_global_model(softmax_regression):
    federation = softmax_regression(FedACG(lam=0.5))
    start = federation.server.weights.clone()
    federation.round()
    federation.load(0)
    moved = federation.server.weights - start
    torch.testing.assert_close(federation.flat.vector, federation.server.weights + 0.5 * moved)


@pytest.mark.parametrize("name", ["fedacg", "fedexp"])
def test_the_decomposition_is_of_the_global_model_where_clients_start_elsewhere(tmp_path, name):
    """Losses measured before training are the start's, not the global model's: they must not stand for it."""
    settings = {"method": name, "image_size": 16, "data": {"samples": 200}, "rounds": 2, "workers": 0}
    for losses in (True, False):
        experiment = make_experiment(settings | {"decompose": 1, "client_losses": losses})
        run(experiment, tmp_path / str(losses))
    told, measured = (read_lines(tmp_path / str(losses), CROSS_LOSS) for losses in (True, False))
    for one, other in zip(told, measured, strict=True):
        assert one["global_losses"] == pytest.approx(other["global_losses"], rel=1e-4)


def context(labels, present, classes=3):
    """A batch with given logits and class counts; the network gives zero logits, and so does the teacher."""
    model = nn.Linear(2, classes, bias=False).double()
    nn.init.zeros_(model.weight)
    flat = FlatModel(model, Layout.of(model))
    images = torch.zeros(len(labels), 2, dtype=torch.float64)
    return Context(
        flat=flat,
        images=images,
        labels=torch.tensor(labels),
        client_labels=torch.tensor(present),
        incoming=flat.vector.clone(),
        round=1,
    )


def gradient(objective, logits, **setting):
    leaf = torch.tensor(logits, dtype=torch.float64).requires_grad_()
    objective.loss(context(**setting).with_logits(leaf)).backward()
    return leaf.grad


SKEWED = {"labels": [0], "present": [0, 0, 0, 0, 1]}


def test_the_balanced_softmax_leaves_absent_classes_alone_and_asks_less_of_frequent_ones():
    slope = gradient(LogitAdjusted(), [[0.0, 0.0, 0.0]], **SKEWED)[0]
    torch.testing.assert_close(slope, torch.tensor([-0.2, 0.2, 0.0], dtype=torch.float64))
    plain = gradient(LogitAdjusted(tau=0.0), [[0.0, 0.0, 0.0]], **SKEWED)[0]
    torch.testing.assert_close(plain, torch.tensor([-2 / 3, 1 / 3, 1 / 3], dtype=torch.float64))


def test_calibration_gives_rare_classes_the_larger_margin():
    value = LogitCalibrated(tau=2.0).loss(
        context(**SKEWED).with_logits(torch.zeros(1, 3, dtype=torch.float64))
    )
    assert value.item() == pytest.approx(math.log1p(math.exp(-2 * (1 - 4**-0.25))))


def test_the_restricted_softmax_pushes_absent_classes_half_as_hard():
    slope = gradient(RestrictedSoftmax(0.5), [[0.0, 0.0, 0.0]], **SKEWED)[0]
    torch.testing.assert_close(slope[2], slope[1] / 2)


def test_not_true_distillation_ignores_the_true_logit_and_two_classes():
    objective, logits = NotTrueDistilled(beta=1.0), [[5.0, 1.0, -1.0]]
    extra = gradient(objective, logits, **SKEWED) - gradient(Objective(), logits, **SKEWED)
    assert extra[0, 0] == pytest.approx(0.0, abs=1e-12)
    assert extra[0, 1] > 0 > extra[0, 2]  # back towards the teacher, to which they are alike
    two = {"labels": [0], "present": [0, 1], "classes": 2}
    torch.testing.assert_close(
        gradient(objective, [[3.0, 1.0]], **two), gradient(Objective(), [[3.0, 1.0]], **two)
    )


def test_correlation_is_that_of_numpy_and_forgives_dead_features():
    features = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = np.corrcoef(features.numpy().T)[~np.eye(4, dtype=bool)]
    assert correlation(features).item() == pytest.approx((expected**2).mean())
    dead = features.clone().requires_grad_()
    correlation(dead * torch.tensor([1.0, 1.0, 1.0, 0.0])).backward()
    assert dead.grad.isfinite().all()


def test_moon_pulls_features_to_the_incoming_model_and_away_from_the_last(images):
    """From the second round on; with mu = 0 it is FedAvg throughout."""
    network = build("cnn", classes=2, image_size=8, seed=0)
    plain, pulled = (images(method, deepcopy(network)) for method in (Moon(mu=0.0), Moon(mu=5.0)))
    assert torch.equal(plain.round(), pulled.round())
    assert not torch.allclose(plain.round(), pulled.round())


def test_sam_steps_by_the_gradient_of_the_perturbed_point(softmax_regression):
    """One step: w - lr grad L(w + rho g / |g|); the perturbation itself is gone afterwards."""
    federation = softmax_regression(FedSAM(rho=0.5), steps=(1, 1, 1), sizes=(1, 1, 1))
    client = federation.client(0)
    w, batch = client.weights.clone(), federation.data[0]

    def slope(at):
        leaf = at.clone().requires_grad_()
        logits = batch.images @ leaf[:12].view(3, 4).T + leaf[12:]
        return torch.autograd.grad(nn.functional.cross_entropy(logits, batch.labels), leaf)[0]

    federation.method.client_update(client)
    g = slope(w)
    expected = w - client.training.lr * slope(w + 0.5 * g / g.norm())
    torch.testing.assert_close(client.weights, expected, rtol=1e-10, atol=1e-12)


def test_fedspeed_reaches_the_optimum_of_all_clients(data):  # noqa: F811
    """Without the perturbation its corrections make the local gradients agree: no drift is left."""
    setting = {"weights": "uniform", "lr": 0.2, "rounds": 200}
    assert distance(FedSpeed(lam=2.0, rho=0.0), data, **setting) < 1e-6


def test_fedspeed_reaches_the_optimum_with_some_of_the_clients_too(data):  # noqa: F811
    """Two of three in turn: the server adds the corrections of all clients, so nothing moves in the end."""
    torch.manual_seed(0)
    training, sizes = [replace(TRAINING, lr=0.2)] * 3, tuple(map(len, data))
    federation = Federation(FedSpeed(lam=2.0, rho=0.0), nn.Linear(4, 3).double(), data, training, sizes)
    for turn in range(300):
        federation.round(*sorted({turn % 3, (turn + 1) % 3}))
    assert (federation.server.weights - optimum(data, shares(sizes))).norm() < 1e-6


def test_dittos_global_model_is_fedavgs_and_its_own_models_are_the_clients(tmp_path):
    settings = {"dataset": "digits", "lr": 0.1, "rounds": 2, "workers": 0, "decompose": 1}
    for name in ("fedavg", "ditto"):
        run(make_experiment(settings | {"method": name}), tmp_path / name)
    plain, ditto = (read_lines(tmp_path / name, CROSS_LOSS) for name in ("fedavg", "ditto"))
    assert plain == ditto
    last = read_lines(tmp_path / "ditto", ROUNDS)[-1]
    assert last["personal"]["accuracy"] != last["test"]["accuracy"]


def test_silobn_keeps_statistics_and_shares_scales(images):
    federation = images(METHODS["silobn"], build("resnet8", classes=2, image_size=8, seed=0), size=8)
    federation.round()
    private = {entry.name for entry in federation.layout.entries if entry.private}
    assert {name.rpartition(".")[2] for name in private} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    kept = [federation.states[i]["private"] for i in range(3)]
    assert not torch.equal(kept[0], kept[1])
    torch.testing.assert_close(federation.layout.private_part(federation.server.weights), sum(kept) / 3)


def test_feddisco_leaves_out_a_client_of_one_class(softmax_regression):
    federation = softmax_regression(METHODS["feddisco"])
    federation.round()
    message = [{"discrepancy": torch.tensor(d, dtype=torch.float64)} for d in (0.0, 0.0, math.log(3))]
    updates = torch.eye(3, 15, dtype=torch.float64)
    replies = replace(federation.replies, updates=updates, messages=message)
    before = federation.server.weights
    server, combined = federation.method.server_update(federation.server, replies)
    torch.testing.assert_close(combined.update[:3], torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(server.weights, before + combined.update)


def test_feddiscos_weights_are_those_of_the_released_code(softmax_regression):
    """Divergences count as shares of their sum over the round: p = 1/3, d = (1, 3, 0)/4, a = 0.5, b = 0.1."""
    federation = softmax_regression(METHODS["feddisco"])
    federation.round()
    message = [{"discrepancy": torch.tensor(d, dtype=torch.float64)} for d in (1.0, 3.0, 0.0)]
    replies = replace(federation.replies, updates=torch.eye(3, 15, dtype=torch.float64), messages=message)
    _, combined = federation.method.server_update(federation.server, replies)
    raw = torch.tensor([1 / 3 - 0.5 / 4 + 0.1, 1 / 3 - 1.5 / 4 + 0.1, 1 / 3 + 0.1], dtype=torch.float64)
    torch.testing.assert_close(combined.update[:3], raw / raw.sum())


def test_ga_gives_weight_to_the_client_whose_loss_rose(softmax_regression):
    federation = softmax_regression(GeneralisationAdjustment(d=0.3))
    federation.round()
    assert torch.equal(federation.server.extra["a"], torch.full((3,), 1 / 3, dtype=torch.float64))
    gaps = [{"gap": torch.tensor(gap, dtype=torch.float64)} for gap in (0.4, 0.0, -0.2)]
    server, _ = federation.method.server_update(federation.server, replace(federation.replies, messages=gaps))
    expected = torch.tensor([1 / 3 + 0.1, 1 / 3, 1 / 3 - 0.05], dtype=torch.float64)
    torch.testing.assert_close(server.extra["a"], expected / expected.sum())


def test_fedrods_heads(images):
    """The personal head is trained and kept; neither it nor its loss touches what is shared."""
    network = build("cnn", classes=2, image_size=8, seed=0)
    rod, plain = images(FedRoD(), deepcopy(network)), images(METHODS["balanced-softmax"], deepcopy(network))
    rod.round(), plain.round()
    shared = rod.layout.views(rod.server.weights)
    for name, value in plain.layout.views(plain.server.weights).items():
        torch.testing.assert_close(shared[name], value)
    assert not shared["personal.weight"].any()
    assert rod.states[0]["private"].any()
    rod.load(0)
    model, x = rod.model.eval(), rod.data[0].images
    features = model.embed(x)
    both = nn.functional.linear(features, model.head.weight, model.head.bias) + model.personal(features)
    torch.testing.assert_close(model(x), both)


def test_ccvr_merges_clients_into_the_pooled_mean_and_covariance():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 4, generator=generator, dtype=torch.float64) + n for n in (7, 1, 12)]
    counts = torch.tensor([7.0, 1.0, 12.0], dtype=torch.float64)
    spreads = [torch.cov(x.T) if len(x) > 1 else torch.zeros(4, 4, dtype=torch.float64) for x in parts]
    mean, covariance = merged(counts, torch.stack([x.mean(0) for x in parts]), torch.stack(spreads))
    pooled = torch.cat(parts)
    torch.testing.assert_close(mean, pooled.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(covariance, torch.cov(pooled.T), rtol=1e-10, atol=1e-10)
    drawn = virtual(mean, covariance, 200_000, generator)
    torch.testing.assert_close(torch.cov(drawn.T), covariance, rtol=0.03, atol=0.3)


def test_ccvr_is_fedavg_with_another_head_at_the_end(tmp_path):
    settings = {"dataset": "digits", "lr": 0.1, "rounds": 2, "workers": 0}
    for name in ("fedavg", "ccvr"):
        run(make_experiment(settings | {"method": name}), tmp_path / name)
    plain, calibrated = (load_file(tmp_path / name / "model.safetensors") for name in ("fedavg", "ccvr"))
    changed = {name for name, value in plain.items() if not value.equal(calibrated[name])}
    assert changed == {"classifier.2.weight", "classifier.2.bias"}
    first, last = (read_lines(tmp_path / "ccvr", ROUNDS)[i] for i in (0, -1))
    assert first == {**read_lines(tmp_path / "fedavg", ROUNDS)[0], "seconds": first["seconds"]}
    assert last["bytes_up"] > first["bytes_up"]
