"""FedAvg with the losses of papers on label skew and features; `fedavg` drives them."""

import torch
import torch.nn.functional as F
from tests.methods.references.problem import CLASSES, sgd


def fedavg(problem, loss):
    """`loss(y, x, labels, w, counts)`: own weights, the batch, the incoming weights, class counts."""
    w = problem.start
    for round_, sampled in problem.rounds:
        models = []
        for i in sampled:
            counts = torch.tensor([(problem.clients[i][1] == c).sum().item() for c in range(CLASSES)])
            models.append(
                sgd(problem, w, round_, i, loss=lambda y, x, t, w=w, n=counts: loss(y, x, t, w, n.double()))
            )
        w = problem.mean(models, sampled)
        yield w


def negative_log(scores, labels):
    """Mean of -log(scores_y / sum of scores)."""
    return -(scores[range(len(labels)), labels] / scores.sum(1)).log().mean()


def fedntd(problem, beta, tau):
    """Lee et al. 2022, Eq. 5 to 7."""

    def loss(y, x, labels, w, counts):
        logits = problem.forward(problem.tensors(y), x)
        teacher = problem.forward(problem.tensors(w.detach()), x)
        total = 0.0
        for f, g, label in zip(logits, teacher, labels, strict=True):
            others = [c for c in range(CLASSES) if c != label]
            q, p = F.softmax(f[others] / tau, 0), F.softmax(g[others] / tau, 0)
            total = total + (p * (p / q).log()).sum()
        return F.cross_entropy(logits, labels) + beta * tau**2 * total / len(labels)

    return fedavg(problem, loss)


def fedlc(problem, tau):
    """Zhang et al. 2022, Eq. 9, the true class among the summands; absent classes left out."""

    def loss(y, x, labels, w, counts):
        logits, has = problem.forward(problem.tensors(y), x), counts > 0
        scores = torch.exp(logits - tau * counts.clamp(min=1) ** -0.25) * has
        return negative_log(scores, labels)

    return fedavg(problem, loss)


def adjusted(problem, tau):
    """Ren et al. 2020, Eq. 4: n_y^tau e^(f_y) over the sum of n_c^tau e^(f_c)."""

    def loss(y, x, labels, w, counts):
        return negative_log(counts**tau * problem.forward(problem.tensors(y), x).exp(), labels)

    return fedavg(problem, loss)


def fedrs(problem, alpha):
    """Li and Zhan 2021, Eq. 6: alpha_c = 1 for observed classes, alpha for missing ones."""

    def loss(y, x, labels, w, counts):
        scale = torch.tensor([1.0 if n > 0 else alpha for n in counts], dtype=torch.float64)
        return negative_log((scale * problem.forward(problem.tensors(y), x)).exp(), labels)

    return fedavg(problem, loss)


def feddecorr(problem, beta):
    """Shi et al. 2023, Eq. 5, at the scale of the released code."""

    def loss(y, x, labels, w, counts):
        value, z = problem.loss(y, x, labels), problem.embed(problem.tensors(y), x)
        n, d = z.shape
        if n == 1:
            return value
        z = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
        total = sum((z[:, a] @ z[:, b]) ** 2 for a in range(d) for b in range(d) if a != b)
        return value + beta * total / (d * (d - 1)) / n

    return fedavg(problem, loss)


def moon(problem, mu, tau):
    """Li et al. 2021, Algorithm 1 and Eq. 3; before a client has a last model the term is absent."""
    w, last = problem.start, {}
    for round_, sampled in problem.rounds:
        models = []
        for i in sampled:

            def contrastive(y, x, labels, w=w, i=i):
                own = last.get(i)
                if own is None:
                    return problem.loss(y, x, labels)
                z, up, down = (problem.embed(problem.tensors(v), x) for v in (y, w, own))
                near, far = (
                    ((z * o).sum(1) / (z.norm(dim=1) * o.norm(dim=1)) / tau).exp() for o in (up, down)
                )
                return problem.loss(y, x, labels) - mu * (near / (near + far)).log().mean()

            models.append(sgd(problem, w, round_, i, loss=contrastive))
            last[i] = models[-1]
        w = problem.mean(models, sampled)
        yield w
