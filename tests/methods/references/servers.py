"""The methods that have an optimiser on the server."""

import torch
from tests.methods.references.problem import sgd


def deltas(problem, step):
    """Reddi et al. 2021, Algorithm 1: Delta is the mean of y - x; `step(Delta)` is the server's optimiser."""
    x = problem.start
    for round_, sampled in problem.rounds:
        x = x + step(problem.mean([sgd(problem, x, round_, i) - x for i in sampled], sampled))
        yield x


def fedavgm(problem, beta, eta):
    """Hsu et al. 2019: v <- beta v + Delta, x <- x + eta v."""
    v = torch.zeros_like(problem.start)

    def step(delta):
        nonlocal v
        v = beta * v + delta
        return eta * v

    yield from deltas(problem, step)


def adaptive(problem, second_moment, eta, beta1, tau):
    """Reddi et al. 2021, Algorithm 2: x <- x + eta m / (sqrt(v) + tau), v starts at tau^2."""
    m = torch.zeros_like(problem.start)
    v = m + tau**2

    def step(delta):
        nonlocal m, v
        m = beta1 * m + (1 - beta1) * delta
        v = second_moment(v, delta**2)
        return eta * m / (v.sqrt() + tau)

    yield from deltas(problem, step)


def fedadam(problem, eta, beta1, beta2, tau):
    """v <- beta2 v + (1 - beta2) Delta^2."""
    yield from adaptive(problem, lambda v, d2: beta2 * v + (1 - beta2) * d2, eta, beta1, tau)


def fedyogi(problem, eta, beta1, beta2, tau):
    """v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
    yield from adaptive(problem, lambda v, d2: v - (1 - beta2) * d2 * (v - d2).sign(), eta, beta1, tau)
