"""Methods whose clients keep or get models of their own: FedBN and pFedLA."""

import torch
from tests.methods.references.problem import sgd

from fedld.seeds import torch_generator

STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


def running(problem, w, x):
    """BatchNorm's statistics after a batch: a tenth of the new, the variance unbiased."""
    w = w.clone()
    t = problem.tensors(w)
    z = x @ t["body.weight"].T + t["body.bias"]
    t["norm.running_mean"].mul_(0.9).add_(0.1 * z.mean(0))
    t["norm.running_var"].mul_(0.9).add_(0.1 * z.var(0))
    t["norm.num_batches_tracked"].add_(1)
    return w


def trained(problem, w, round_, i):
    """SGD on the parameters; the statistics follow the batches."""
    parameters = 1 - problem.mask(*STATISTICS)
    return sgd(problem, w, round_, i, only=parameters, running=lambda w, x: running(problem, w, x))


def averaged(problem, models, sampled):
    """Mean of everything; of the counter of batches the maximum."""
    counter = problem.mask("norm.num_batches_tracked") > 0
    return torch.where(counter, torch.stack(models).amax(0), problem.mean(models, sampled))


def fedavg(problem):
    """FedAvg with BatchNorm statistics that are averaged with the model."""
    w = problem.start
    for round_, sampled in problem.rounds:
        w = averaged(problem, [trained(problem, w, round_, i) for i in sampled], sampled)
        yield w


def fedbn(problem, private=("norm.weight", "norm.bias", *STATISTICS)):
    """Li et al. 2021, Algorithm 1: BatchNorm is never overwritten; who has none takes the global model's.

    With the statistics alone as `private` it is SiloBN (Andreux et al. 2020).
    """
    w, own = problem.start, {}
    private = problem.mask(*private) > 0
    for round_, sampled in problem.rounds:
        for i in sampled:
            own[i] = trained(problem, torch.where(private, own.get(i, w), w), round_, i)
        w = averaged(problem, [own[i] for i in sampled], sampled)
        yield w, {i: torch.where(private, own.get(i, w), w) for i in range(len(problem.sizes))}


def local(problem):
    """Everybody for itself."""
    own = {}
    for round_, sampled in problem.rounds:
        own |= {i: sgd(problem, own.get(i, problem.start), round_, i) for i in sampled}
        yield None, {i: own.get(i, problem.start) for i in range(len(problem.sizes))}


def pfedla(problem, hn_lr, embedding=32, hidden=32):
    """Ma et al. 2022, Algorithm 1, a hypernetwork per client; here with automatic Jacobians."""
    n, names = len(problem.sizes), problem.names
    layers = list(dict.fromkeys(name.split(".")[0] for name in names))
    generator = torch_generator(0, "pfedla")
    v = torch.randn(n, embedding, generator=generator).double()
    w1 = embedding**-0.5 * torch.randn(n, hidden, embedding, generator=generator).double()
    networks = [[v[i], w1[i], torch.zeros(len(layers), n, hidden).double()] for i in range(n)]
    models = {}

    def start(i, network):
        """sum_j alpha_i[l, j] theta_j in every layer l."""
        if not models:
            return problem.start
        embedded, first, second = network
        scores = second @ torch.relu(first @ embedded)
        present = sorted(models)
        alpha = scores[:, present].softmax(1)
        stacked = {name: torch.stack([problem.tensors(models[j])[name] for j in present]) for name in names}
        parts = [
            torch.tensordot(alpha[layers.index(name.split(".")[0])], stacked[name], dims=1) for name in names
        ]
        return torch.cat([part.flatten() for part in parts])

    for round_, sampled in problem.rounds:
        after = {}
        for i in sampled:
            leaves = [part.clone().requires_grad_() for part in networks[i]]
            incoming = start(i, leaves)
            after[i] = sgd(problem, incoming.detach(), round_, i)
            if models:
                change = incoming.detach() - after[i]
                slopes = torch.autograd.grad(incoming, leaves, grad_outputs=change)
                networks[i] = [part - hn_lr * slope for part, slope in zip(networks[i], slopes, strict=True)]
        models |= after
        yield None, {i: start(i, networks[i]) for i in range(n)}
