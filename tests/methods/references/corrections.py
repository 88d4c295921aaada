"""FedAvg and the methods that correct the clients' gradients or normalise their updates."""

import torch
from tests.methods.references.problem import gradient_weights, sgd


def fedavg(problem):
    """McMahan et al. 2017, Algorithm 1."""
    w = problem.start
    for round_, sampled in problem.rounds:
        w = problem.mean([sgd(problem, w, round_, i) for i in sampled], sampled)
        yield w


def fedprox(problem, mu):
    """Li et al. 2020: each client minimises L_i(y) + (mu/2) |y - w|^2."""
    w = problem.start
    for round_, sampled in problem.rounds:

        def proximal(y, x, labels, w=w):
            return problem.loss(y, x, labels) + mu / 2 * (y - w).square().sum()

        w = problem.mean([sgd(problem, w, round_, i, loss=proximal) for i in sampled], sampled)
        yield w


def scaffold(problem, eta):
    """Karimireddy et al. 2020, Algorithm 1, option II, with n_i/n for 1/N; c is the mean of the c_i."""
    x, everyone = problem.start, range(len(problem.sizes))
    controls = [torch.zeros_like(x) for _ in everyone]
    for round_, sampled in problem.rounds:
        c, models = problem.mean(controls, everyone), []
        for i in sampled:
            y = sgd(problem, x, round_, i, correct=lambda w, g, s=c - controls[i]: g + s)
            controls[i] = controls[i] - c + (x - y) / (problem.lr * gradient_weights(problem, i))
            models.append(y)
        x = x + eta * problem.mean([y - x for y in models], sampled)
        yield x


def fedlin(problem):
    """Mitra et al. 2021, Eq. 3: gradients at x from all clients first, then steps g(y) - g_i(x) + g(x)."""
    x = problem.start
    for round_, sampled in problem.rounds:
        leaf = x.clone().requires_grad_()
        gradients = [torch.autograd.grad(problem.loss(leaf, *problem.clients[i]), leaf)[0] for i in sampled]
        g, models = problem.mean(gradients, sampled), []
        for i, g_i in zip(sampled, gradients, strict=True):
            models.append(sgd(problem, x, round_, i, correct=lambda w, d, s=g - g_i: d + s))
        x = problem.mean(models, sampled)
        yield x


def fedcm(problem, alpha):
    """Xu et al. 2021, Algorithm 2: Delta is the mean over clients of the mean step, of unit learning rate."""
    w, delta = problem.start, torch.zeros_like(problem.start)
    for round_, sampled in problem.rounds:

        def lean(w, g, delta=delta):
            return alpha * g + (1 - alpha) * delta

        models = [sgd(problem, w, round_, i, correct=lean) for i in sampled]
        lengths = [
            torch.full((), problem.lr * gradient_weights(problem, i), dtype=torch.float64) for i in sampled
        ]
        after = problem.mean(models, sampled)
        delta = (w - after) / problem.mean(lengths, sampled)
        w = after
        yield w


def fednova(problem):
    """Wang et al. 2020, Eq. 7 to 9: d_i = (w - w_i) / (lr |a_i|_1), w <- w - tau_eff lr sum_i p_i d_i."""
    w = problem.start
    for round_, sampled in problem.rounds:
        tau = torch.tensor([gradient_weights(problem, i) for i in sampled], dtype=torch.float64)
        directions = [(w - sgd(problem, w, round_, i)) / t for i, t in zip(sampled, tau, strict=True)]
        w = w - (problem.p(sampled) @ tau) * problem.mean(directions, sampled)
        yield w
