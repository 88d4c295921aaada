"""The methods that look at the network's features and head: FedIIR, FedSR, FedPAC."""

import torch
import torch.nn.functional as F
from tests.methods.references.problem import CLASSES, HIDDEN, sgd
from torch.distributions import Normal, kl_divergence

from fedld.seeds import derive

HEAD = ("top.weight", "top.bias")


def fediir(problem, gamma, ema):
    """Guo et al. 2023, Algorithm 1: mean gradients of the head first, then training with the penalty."""
    w, head = problem.start, problem.mask(*HEAD)
    average = torch.zeros_like(w)

    def head_gradient(y, x, labels):
        value = problem.loss(y, x, labels)
        return value, torch.autograd.grad(value, y, create_graph=True)[0] * head

    for round_, sampled in problem.rounds:
        leaf = w.clone().requires_grad_()
        gradients = [head_gradient(leaf, *problem.clients[i])[1].detach() for i in sampled]
        average = ema * average + (1 - ema) * problem.mean(gradients, sampled)

        def invariant(y, x, labels, average=average):
            value, own = head_gradient(y, x, labels)
            return value + gamma * (own - average).square().sum()

        w = problem.mean([sgd(problem, w, round_, i, loss=invariant) for i in sampled], sampled)
        yield w


def fedsr(problem, l2r, cmi):
    """Nguyen et al. 2022, Eq. 9: CE(z) + l2r |z| + cmi KL(z | r_y); the references r stay with the client.

    The noise comes from the generator that the engine gives a client and round.
    """
    w, own = problem.start, {}
    private = problem.mask("r_mu", "r_sigma", "r_scale")
    for round_, sampled in problem.rounds:
        models = []
        for i in sampled:
            noise = torch.Generator().manual_seed(derive(0, "noise", round_, f"c{i}", 0))

            def regularised(y, x, labels, noise=noise):
                t = problem.tensors(y)
                mu = problem.embed(t, x)
                sigma = F.softplus(mu @ t["spread.weight"].T + t["spread.bias"])
                z = mu + sigma * torch.randn(mu.shape, generator=noise, dtype=mu.dtype)
                value = F.cross_entropy(z @ t["top.weight"].T + t["top.bias"], labels)
                encoder = Normal(mu * t["r_scale"], sigma * t["r_scale"])
                reference = Normal(t["r_mu"][labels], F.softplus(t["r_sigma"])[labels])
                divergence = kl_divergence(encoder, reference).sum(1).mean()
                return value + l2r * z.norm(dim=1).mean() + cmi * divergence

            start = torch.where(private > 0, own.get(i, w), w)
            own[i] = sgd(problem, start, round_, i, loss=regularised)
            models.append(own[i])
        w = torch.where(private > 0, w, problem.mean(models, sampled))
        yield w, {i: torch.where(private > 0, own[i], w) for i in own}


def fedpac(problem, lam, head_lr):
    """Xu et al. 2023, Algorithm 1; of two sampled clients the mixture of heads has a closed form (Eq. 8)."""
    w, head = problem.start, problem.mask(*HEAD)
    heads = dict.fromkeys(range(len(problem.sizes)), w)
    prototypes = {}
    for round_, sampled in problem.rounds:
        models, means, h, v = {}, {}, {}, {}
        for i in sampled:
            start = torch.where(head > 0, heads[i], w)
            h[i], v[i] = statistics(problem, start, i)
            y = sgd(problem, start, round_, i, only=head, epochs=[0], lr=head_lr)

            def aligned(y, x, labels):
                features = problem.embed(problem.tensors(y), x)
                known = {k: value for k, value in prototypes.items() if (labels == k).any()}
                distance = sum((features[labels == k] - c).square().sum() for k, c in known.items())
                return problem.loss(y, x, labels) + lam * distance / features.numel()

            models[i] = sgd(problem, y, round_, i, loss=aligned, only=1 - head, epochs=[1, 2])
            means[i] = class_means(problem, models[i], i)
        w = problem.mean([models[i] for i in sampled], sampled)
        for k in range(CLASSES):
            total = sum(count for i in sampled for count, _ in [means[i][k]])
            if total:
                prototypes[k] = sum(count * mean for i in sampled for count, mean in [means[i][k]]) / total
        for i in sampled:
            heads[i] = mixed(models, h, v, i)
        yield w, {i: torch.where(head > 0, heads[i], w) for i in heads}


def class_means(problem, w, client):
    """Count and mean feature of every class."""
    x, labels = problem.clients[client]
    features = problem.embed(problem.tensors(w), x)
    own = {k: features[labels == k] for k in range(CLASSES)}
    return {k: (len(f), f.mean(0) if len(f) else features.new_zeros(HIDDEN)) for k, f in own.items()}


def statistics(problem, w, client):
    """h_k = p(k) mu_k, and the variance of the mean of the features: (E|f|^2 - sum_k |h_k|^2) / n."""
    x, _ = problem.clients[client]
    n = len(x)
    h = torch.cat([count / n * mean for count, mean in class_means(problem, w, client).values()])
    return h, (problem.embed(problem.tensors(w), x).square().sum() / n - h.square().sum()) / n


def mixed(models, h, v, i):
    """a head_1 + (1 - a) head_2 with the least v_1 a^2 + v_2 (1 - a)^2 + |h_i - a h_1 - (1 - a) h_2|^2."""
    one, two = models
    d1, d2 = h[i] - h[one], h[i] - h[two]
    a = (v[two] + d2 @ d2 - d1 @ d2) / (v[one] + v[two] + (d1 - d2) @ (d1 - d2))
    a = a.clamp(0, 1)
    return a * models[one] + (1 - a) * models[two]
