"""Whole trajectories against local_traces.npz, float64, 1e-10."""

import numpy as np
import pytest
import torch

from fedld.methods import METHODS
from fedld.methods.averaging import FedNova
from fedld.methods.fedprox import FedProx
from fedld.methods.momentum import FedCM
from fedld.methods.scaffold import Scaffold
from fedld.methods.server_optimisers import FedAdam, FedAvgM, FedYogi


def trajectory(federation, rounds=4):
    start = federation.server.weights.clone()
    return torch.stack([start] + [federation.round() for _ in range(rounds)]).numpy()


@pytest.mark.parametrize(
    ("method", "key"),
    [
        (METHODS["fedavg"], "fedavg"),
        (FedProx(mu=0.1), "fedprox_mu0.1"),
        (FedCM(alpha=0.1), "fedcm_alpha0.1"),
        (FedCM(alpha=0.5), "fedcm_alpha0.5"),
        (Scaffold(), "scaffold_w"),
    ],
)
def test_trajectory(softmax_regression, oracle, method, key):
    found = trajectory(softmax_regression(method))
    np.testing.assert_allclose(found, oracle("local_traces")[key], rtol=1e-10, atol=1e-12)


def test_scaffold_control_variates(softmax_regression, oracle):
    traces = oracle("local_traces")
    federation = softmax_regression(Scaffold())
    controls = [federation.server.extra["c"].numpy()]
    for _ in range(4):
        federation.round()
        controls.append(federation.server.extra["c"].numpy())
    np.testing.assert_allclose(np.stack(controls), traces["scaffold_c"], rtol=1e-10, atol=1e-12)
    own = np.stack([federation.states[i]["c_i"].numpy() for i in range(3)])
    np.testing.assert_allclose(own, traces["scaffold_ci_final"], rtol=1e-10, atol=1e-12)


def test_fednova(softmax_regression, oracle):
    federation = softmax_regression(FedNova(), steps=(5, 2, 9), sizes=(5, 1, 4))
    np.testing.assert_allclose(
        trajectory(federation), oracle("local_traces")["fednova_K5_2_9"], rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rate_sum_makes_updates_mean_gradients(softmax_regression, momentum):
    """With a constant gradient, (w - w_i) / rate_sum is that gradient, whatever the momentum."""
    federation = softmax_regression(METHODS["fedavg"], momentum=momentum)
    client = federation.client(0)
    direction = torch.arange(15.0, dtype=torch.float64)

    def constant(weights, gradient):
        gradient.copy_(direction)

    before = client.weights.clone()
    client.train(federation.method.loss, correction=constant)
    torch.testing.assert_close((before - client.weights) / client.rate_sum, direction)


def test_scaffold_sums_changes_over_all_clients(softmax_regression):
    federation = softmax_regression(Scaffold())
    federation.round(1)
    change = federation.states[1]["c_i"]
    torch.testing.assert_close(federation.server.extra["c"], change / 3)
    assert set(federation.states) == {1}


def updates_of(method, softmax_regression, rounds=3):
    """The method's own updates beside the plain aggregate it saw, round by round."""
    federation = softmax_regression(method)
    seen, previous = [], federation.server.weights
    for _ in range(rounds):
        now = federation.round()
        seen.append((now - previous, federation.combined.update))
        previous = now
    return seen


def test_fedavgm_accumulates(softmax_regression):
    velocity = torch.zeros(15, dtype=torch.float64)
    for step, aggregate in updates_of(FedAvgM(beta=0.5, eta=2.0), softmax_regression):
        velocity = 0.5 * velocity + aggregate
        torch.testing.assert_close(step, 2.0 * velocity)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adaptive_server(softmax_regression, kind):
    m = torch.zeros(15, dtype=torch.float64)
    v = torch.full_like(m, 1e-6)
    for step, delta in updates_of(kind(), softmax_regression):
        m = 0.9 * m + 0.1 * delta
        square = delta**2
        v = 0.99 * v + 0.01 * square if kind is FedAdam else v - 0.01 * square * torch.sign(v - square)
        torch.testing.assert_close(step, 0.01 * m / (v.sqrt() + 1e-3), rtol=1e-10, atol=1e-12)
