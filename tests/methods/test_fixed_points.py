"""What methods achieve, on a convex problem whose answer is known: three clients of 90, 10 and 10 samples.

Softmax regression with weight decay has one optimum of Eq. 1, found here by Newton's method. Accuracies of
small networks differ from processor to processor; these distances do not.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy
import torch
import torch.nn.functional as F
from tests.methods.conftest import Federation, FullBatch
from torch import nn

from fedld.errors import FedLDError
from fedld.local import Training
from fedld.methods import METHODS
from fedld.methods.base import shares
from fedld.methods.fedlin import FedLin
from fedld.methods.fedprox import FedProx
from fedld.methods.momentum import FedCM
from fedld.methods.scaffold import Scaffold

SIZES = (90, 10, 10)
DECAY = 0.3
TRAINING = Training(epochs=4, batch_size=50, lr=0.3, momentum=0.0, weight_decay=DECAY)


@pytest.fixture(scope="module")
def data():
    """Clients that disagree on what the features mean."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for size in SIZES:
        truth = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        found.append(FullBatch(x, (x @ truth).argmax(1)))
    return found


def risk(w, batch):
    """L_i(w) + (decay/2) |w|^2 of a linear classifier."""
    return F.cross_entropy(batch.images @ w[:12].view(3, 4).T + w[12:], batch.labels) + DECAY / 2 * w @ w


def objective(data, p):
    """Eq. 1 with decay, as a function of the weights."""
    return lambda w: sum(share * risk(w, batch) for share, batch in zip(p, data, strict=True))


def optimum(data, p):
    """Newton's method: a strictly convex function of 3 x 5 numbers, the last column the biases."""
    w, eye = np.zeros((3, 5)), np.eye(3)
    for _ in range(12):
        slope, bend = DECAY * w, DECAY * np.eye(15)
        for share, batch in zip(p.tolist(), data, strict=True):
            x = np.column_stack([batch.images, np.ones(len(batch))])
            q = scipy.special.softmax(x @ w.T, axis=1)
            slope = slope + share / len(x) * (q - eye[batch.labels]).T @ x
            spread = np.einsum("nk,kl->nkl", q, eye) - np.einsum("nk,nl->nkl", q, q)
            bend = bend + share / len(x) * np.einsum("nkl,ni,nj->kilj", spread, x, x).reshape(15, 15)
        w = w - np.linalg.solve(bend, slope.ravel()).reshape(3, 5)
    assert np.linalg.norm(slope) < 1e-12
    return torch.from_numpy(np.concatenate([w[:, :4].ravel(), w[:, 4]]))


def train(method, data, rounds=60, clients=(), **setting):
    torch.manual_seed(0)
    training = [replace(TRAINING, **setting)] * len(data)
    federation = Federation(method, nn.Linear(4, 3).double(), data, training, tuple(map(len, data)))
    for _ in range(rounds):
        federation.round(*clients)
    return federation.server.weights


def distance(method, data, weights="size", **setting):
    """How far a method ends from the optimum of its own weights."""
    found = train(replace(method, client_weights=weights), data, **setting)
    return (found - optimum(data, shares(SIZES, weights))).norm().item()


EXACT = {"fedavg": METHODS["fedavg"], "fedprox": FedProx(mu=0.5), "fedcm": FedCM(alpha=0.5)}


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("name", EXACT)
def test_with_one_step_a_round_the_optimum_is_the_fixed_point(data, name, weights):
    """Decay is a part of the loss: no correction (FedProx, FedCM) may make it weaker or stronger."""
    assert distance(EXACT[name], data, weights, epochs=1, lr=1.0) < 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("method", [Scaffold(), Scaffold(first="gradient", beta=0.2), FedLin()])
def test_control_removes_the_drift_of_unequal_clients(data, method, weights, momentum):
    """Its fixed point is the optimum for any number of steps: FedAvg's is not."""
    setting = {"weights": weights, "momentum": momentum, "lr": 0.2}
    drift = distance(METHODS["fedavg"], data, **setting)
    assert distance(method, data, **setting) < 1e-6
    assert drift > 1e-3


def test_scaffold_may_begin_with_a_step_along_the_mean_gradient(data):
    """Round 1 is then a step of gradient descent on Eq. 1, and the control variates are the gradients."""
    training = [replace(TRAINING, batch_size=100)] * 3
    federation = Federation(Scaffold(first="gradient"), nn.Linear(4, 3).double(), data, training, SIZES)
    start = federation.server.weights.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(data, shares(SIZES))(start), start)
    federation.round()
    torch.testing.assert_close(federation.server.weights, start.detach() - TRAINING.lr * slope)
    torch.testing.assert_close(federation.server.extra["c"], slope)
    with pytest.raises(FedLDError, match="first is 'zero' or 'gradient', not 'full'"):
        Scaffold(first="full")
    with pytest.raises(FedLDError, match="beta, the server's momentum, is at least 0 and below 1, not 1"):
        Scaffold(beta=1.0)


def test_scaffold_with_momentum_on_the_server_adds_the_last_step(data):
    places = {}
    for beta in (0.0, 0.5):
        torch.manual_seed(0)
        federation = Federation(
            Scaffold(beta=beta), nn.Linear(4, 3).double(), data, [replace(TRAINING, lr=0.1)] * 3, SIZES
        )
        places[beta] = [federation.server.weights.clone()]
        for _ in range(2):
            federation.round()
            places[beta].append(federation.server.weights.clone())
    start, first, second = places[0.0]
    torch.testing.assert_close(places[0.5], [start, first, second + 0.5 * (first - start)])


def test_scaffold_reaches_the_optimum_with_some_of_the_clients_too(data):
    """Two of three in turn: every client's control variate is right in the end, so nothing moves any more."""
    torch.manual_seed(0)
    training = [replace(TRAINING, lr=0.2)] * 3
    federation = Federation(Scaffold(), nn.Linear(4, 3).double(), data, training, SIZES)
    for turn in range(150):
        federation.round(*sorted({turn % 3, (turn + 1) % 3}))
    assert (federation.server.weights - optimum(data, shares(SIZES))).norm() < 1e-6


def test_federation_beats_training_alone(data):
    """For everybody's samples the federated optimum is better than any client's own, by definition of it."""
    loss = objective(data, shares(SIZES))
    together = loss(train(METHODS["fedavg"], data, epochs=1, lr=1.0))
    alone = [loss(train(METHODS["fedavg"], data, epochs=1, lr=1.0, clients=(i,))) for i in range(3)]
    assert all(together < one for one in alone)


@pytest.mark.parametrize("name", EXACT)
def test_the_loss_falls_in_every_round(data, name):
    loss = objective(data, shares(SIZES))
    values = [loss(train(EXACT[name], data, rounds=k, lr=0.1, epochs=1)).item() for k in range(6)]
    assert all(after < before for before, after in pairwise(values))
