"""Methods whose server combines the updates in another way: FedLD, FedGH, FedMA and GAMF."""

from itertools import permutations

import numpy as np
import scipy
import torch
import torch.nn.functional as F
from tests.methods.references.problem import CLASSES, sgd


def fedld(problem, lam, share=0.8):
    """Zeng et al. 2024, supplementary algorithm: margin control (Eq. 3), principal gradients (Eq. 4 to 7)."""
    w = problem.start

    def margin(y, x, labels):
        logits = problem.forward(problem.tensors(y), x)
        return F.cross_entropy(logits, labels) + lam * (1 + logits.square().sum(1)).log().mean()

    for round_, sampled in problem.rounds:
        G = torch.stack([sgd(problem, w, round_, i, loss=margin) - w for i in sampled]).numpy()
        _, s, axes = np.linalg.svd(G, full_matrices=False)
        L = max(1, int(share * len(G) + 1e-9))
        weight = s[:L] ** 2 / np.linalg.norm(s[:L] ** 2)
        step = np.zeros(len(w))
        for p, g in zip(problem.p(sampled).numpy(), G, strict=True):
            revised = sum(weight[k] * np.sign(g @ axes[k]) * axes[k] for k in range(L))
            step += p * np.linalg.norm(g) * revised
        w = w + torch.from_numpy(step)
        yield w


def fedld_official(problem, lam, share=0.8):
    """FedLD's released code: the batch's probabilities in the margin term; tensor by tensor, clients alike.

    Axes have their share of the sum of all eigenvalues; the first round is a plain mean.
    """
    w = problem.start

    def margin(y, x, labels):
        logits = problem.forward(problem.tensors(y), x)
        return F.cross_entropy(logits, labels) + lam * (1 + logits.softmax(1).square().sum()).log()

    for round_, sampled in problem.rounds:
        updates = [sgd(problem, w, round_, i, loss=margin) - w for i in sampled]
        step = torch.stack(updates).mean(0)
        for name in problem.names if round_ > 1 else ():
            G = torch.stack([problem.tensors(g)[name].flatten() for g in updates]).numpy()
            _, s, axes = np.linalg.svd(G, full_matrices=False)
            L = int(share * len(G))
            votes = np.sign(G @ axes[:L].T) * (s[:L] ** 2 / (s**2).sum())
            revised = np.linalg.norm(G, axis=1, keepdims=True) * (votes @ axes[:L])
            problem.tensors(step)[name].copy_(
                torch.from_numpy(revised.mean(0)).view_as(problem.tensors(w)[name])
            )
        w = w + step
        yield w


def fedgh(problem):
    """Zhang et al. 2024, Algorithm 1: of two opposed updates each loses its part along the other."""
    w = problem.start
    for round_, sampled in problem.rounds:
        g = [(sgd(problem, w, round_, i) - w).numpy() for i in sampled]
        for i in range(len(g)):
            for j in range(i + 1, len(g)):
                dot = g[i] @ g[j]
                if dot < 0:
                    g[i], g[j] = g[i] - dot / (g[j] @ g[j]) * g[j], g[j] - dot / (g[i] @ g[i]) * g[i]
        w = w + problem.mean([torch.from_numpy(one) for one in g], sampled)
        yield w


def fedma(problem, clip):
    """Wang et al. 2020, Algorithm 1 with one hidden layer, on two clients: the likeliest of all matchings.

    With two clients and as many global neurons as local ones the posterior is largest where the sum of
    squared distances between matched neurons is least, whatever the priors and the number of sweeps.
    """
    w, frozen = problem.start, 0
    body, top = ("body.weight", "body.bias"), ("top.weight", "top.bias")
    for round_, sampled in problem.rounds:
        free = problem.mask(*top) if frozen else problem.mask(*body, *top)

        def clipped(w, g, free=free):
            return g * free * min(1.0, clip / (g * free).norm().item())

        models = [sgd(problem, w, round_, i, correct=clipped, only=free) for i in sampled]
        first, second = (problem.tensors(model) for model in models)
        if not frozen:
            one, two = (torch.cat([t["body.weight"], t["body.bias"][:, None]], 1) for t in (first, second))
            orders = [list(order) for order in permutations(range(len(one)))]
            best = min(orders, key=lambda order: (one - two[order]).square().sum())
            second = reordered(second, best)
        counts = torch.stack([problem.clients[i][1].bincount(minlength=CLASSES) for i in sampled]).double()
        shares = torch.where(counts.sum(0) > 0, counts / counts.sum(0), problem.p(sampled)[:, None])
        parts = []
        for name in problem.names:
            a, b = first[name], second[name]
            if name in body:
                parts.append(problem.mean([a, b], sampled))
            else:
                rows = shares if a.dim() == 1 else shares[:, :, None]
                parts.append(rows[0] * a + rows[1] * b)
        w = torch.cat([part.flatten() for part in parts])
        frozen = 1 - frozen
        yield w


def reordered(t, order):
    """The same network with its hidden neurons in another order."""
    return {
        "body.weight": t["body.weight"][order],
        "body.bias": t["body.bias"][order],
        "top.weight": t["top.weight"][:, order],
        "top.bias": t["top.bias"],
    }


def gamf(problem):
    """Liu et al. 2022, Algorithm 2, on two clients with one hidden layer: the first gives the order."""
    w = problem.start
    for round_, sampled in problem.rounds:
        models = [sgd(problem, w, round_, i) for i in sampled]
        first, second = ({k: t.numpy() for k, t in problem.tensors(model).items()} for model in models)
        one, two = (np.vstack([t["body.weight"].T, t["body.bias"], t["top.weight"]]) for t in (first, second))
        mean, width = one, one.shape[1]  # columns: all that goes into a neuron and comes out of it
        for tau in np.geomspace(0.05, 0.005, 6):
            likeness = two.T @ mean
            P = np.exp(likeness / abs(likeness).max() / tau)
            for turn in range(30):
                P = P / P.sum(axis=1 - turn % 2, keepdims=True)
            mean = (one + two @ P) / 2
        order = scipy.optimize.linear_sum_assignment(-P.T)[1]
        assert len(set(order.tolist())) == width
        matched = reordered(problem.tensors(models[1]), order.tolist())
        second = torch.cat([matched[name].flatten() for name in problem.names])
        w = problem.mean([models[0], second], sampled)
        yield w
