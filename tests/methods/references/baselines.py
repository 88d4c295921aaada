"""The field's strong baselines: dynamic regularisation, extrapolation, acceleration."""

import math

import torch
from tests.methods.references.problem import CLASSES, sgd


def feddyn(problem, alpha):
    """Acar et al. 2021, Algorithm 1, with n_i/n for 1/m; the regulariser is differentiated, not corrected."""
    w, everyone = problem.start, range(len(problem.sizes))
    gradients, h = [torch.zeros_like(w) for _ in everyone], torch.zeros_like(w)
    share = problem.p(everyone)
    for round_, sampled in problem.rounds:
        models = []
        for i in sampled:

            def dynamic(y, x, labels, w=w, g=gradients[i]):
                penalty = alpha / 2 * (y - w).square().sum()
                return problem.loss(y, x, labels) - g @ y + penalty

            models.append(sgd(problem, w, round_, i, loss=dynamic))
            gradients[i] = gradients[i] - alpha * (models[-1] - w)
            h = h - alpha * share[i] * (models[-1] - w)
        w = problem.mean(models, sampled) - h / alpha
        yield w


def fedexp(problem, epsilon):
    """Jhunjhunwala et al. 2023, Algorithm 1, with n_i/n for 1/M; the mean of the last two iterates."""
    w = problem.start
    for round_, sampled in problem.rounds:
        deltas = [sgd(problem, w, round_, i) - w for i in sampled]
        delta = problem.mean(deltas, sampled)
        squares = problem.mean([(d**2).sum() for d in deltas], sampled)
        eta = torch.clamp(squares / (2 * ((delta**2).sum() + epsilon)), min=1)
        last, w = w, w + eta * delta
        yield (last + w) / 2


def fedacg(problem, lam, mu):
    """Kim et al. 2024, Algorithm 1."""
    w, m = problem.start, torch.zeros_like(problem.start)
    for round_, sampled in problem.rounds:
        ahead = w + lam * m

        def proximal(y, x, labels, ahead=ahead):
            return problem.loss(y, x, labels) + mu / 2 * (y - ahead).square().sum()

        deltas = [sgd(problem, ahead, round_, i, loss=proximal) - ahead for i in sampled]
        m = lam * m + problem.mean(deltas, sampled)
        w = w + m
        yield w


def ascent(problem, rho):
    """Gradients of a batch's loss with decay at w and at w + rho g / |g|."""

    def both(w, x, labels):
        def gradient(at):
            leaf = at.clone().requires_grad_()
            value = problem.loss(leaf, x, labels) + problem.decay / 2 * leaf.square().sum()
            return torch.autograd.grad(value, leaf)[0]

        first = gradient(w)
        return first, gradient(w + rho * first / first.norm())

    return both


def sharp_sgd(problem, w, round_, client, rho, mix):
    """SGD whose gradient is `mix(w, g1, g2)`, g1 at w and g2 at w + rho g1 / |g1|, decay in both."""
    both, v = ascent(problem, rho), torch.zeros_like(w)
    for epoch in range(problem.epochs):
        for x, labels in problem.batches(client, round_, epoch):
            v = problem.momentum * v + mix(w, *both(w, x, labels))
            w = w - problem.lr * v
    return w


def fedsam(problem, rho):
    """Qu et al. 2022, Algorithm 1."""
    w = problem.start
    for round_, sampled in problem.rounds:
        models = [sharp_sgd(problem, w, round_, i, rho, lambda w, g1, g2: g2) for i in sampled]
        w = problem.mean(models, sampled)
        yield w


def fedspeed(problem, lam, alpha, rho):
    """Sun et al. 2023, Algorithm 1 at the clients, the server of the released code.

    That one adds to the mean model the mean over *all* clients of h_i, the sum of client i's updates so far.
    """
    w, everybody = problem.start, range(len(problem.sizes))
    corrections = [torch.zeros_like(w) for _ in problem.sizes]
    h = [torch.zeros_like(w) for _ in problem.sizes]
    for round_, sampled in problem.rounds:
        sent = []
        for i in sampled:

            def quasi(y, g1, g2, w=w, g=corrections[i]):
                return (1 - alpha) * g1 + alpha * g2 - g + (y - w) / lam

            model = sharp_sgd(problem, w, round_, i, rho, quasi)
            corrections[i] = corrections[i] - (model - w) / lam
            h[i] = h[i] + (model - w)
            sent.append(model)
        w = problem.mean(sent, sampled) + problem.mean(h, everybody)
        yield w


def ditto(problem, lam):
    """Li et al. 2021, Algorithm 1, the local solver two epochs of SGD; v_i starts from the global model."""
    w, own = problem.start, {}
    for round_, sampled in problem.rounds:
        models = [sgd(problem, w, round_, i) for i in sampled]
        for i in sampled:

            def towards(v, x, labels, w=w):
                return problem.loss(v, x, labels) + lam / 2 * (v - w).square().sum()

            own[i] = sgd(problem, own.get(i, w), round_, i, loss=towards, epochs=(2, 3))
        w = problem.mean(models, sampled)
        yield w, own


def feddisco(problem, a, b):
    """Ye et al. 2023, Eq. 5, as released: weights max(0, p_i - a d_i + b), normalised.

    d_i = KL_i / sum_j KL_j over the round's clients, where KL_i is KL(labels of i | uniform): `difference` in
    `get_distribution_difference(..., metric="kl")`, then `disco_weight_adjusting`.
    """
    w = problem.start
    for round_, sampled in problem.rounds:
        divergences = []
        for i in sampled:
            labels = problem.clients[i][1].tolist()
            shares = [labels.count(c) / len(labels) for c in set(labels)]
            divergences.append(sum(s * math.log(s * CLASSES) for s in shares))
        raw = []
        for p, divergence in zip(problem.p(sampled).tolist(), divergences, strict=True):
            raw.append(max(0.0, p - a * divergence / (sum(divergences) or 1.0) + b))
        assert sum(raw) > 0
        models = [sgd(problem, w, round_, i) for i in sampled]
        w = sum(r / sum(raw) * model for r, model in zip(raw, models, strict=True))
        yield w


def fedga(problem, d):
    """Zhang et al. 2023, Algorithm 1, from n_i/n, d constant; gaps on training samples."""
    w, N = problem.start, len(problem.sizes)
    a, after = problem.p(range(N)).tolist(), {}
    for round_, sampled in problem.rounds:
        gaps, models = {}, {}
        for i in sampled:
            before = problem.loss(w, *problem.clients[i]).item()
            gaps[i] = before - after.get(i, before)
            models[i] = sgd(problem, w, round_, i)
            after[i] = problem.loss(models[i], *problem.clients[i]).item()
        if any(gaps.values()):
            most = max(abs(gap) for gap in gaps.values())
            for i in sampled:
                a[i] = min(max(a[i] + d / N * gaps[i] / most, 0.0), 1.0)
            a = [value / sum(a) for value in a]
        w = sum(a[i] * models[i] for i in sampled) / sum(a[i] for i in sampled)
        yield w
