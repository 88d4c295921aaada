from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedld.layout import Tree
from fedld.methods.base import Card
from fedld.methods.closed import ClosedForm, cholesky_solve
from fedld.methods.moments import LinearProblem


@dataclass(frozen=True)
class LDA(ClosedForm):
    """Gaussian classes with one covariance, from sums: the pooled solution in one round.

    S = A - sum_c n_c mu_c mu_c' for standardised inputs, M = (S + lam I) / n, logits of class c
    x'M^-1 mu_c - mu_c'M^-1 mu_c / 2 + log(n_c / n); with `balanced` no class is likelier than another.
    """

    card: ClassVar[Card] = Card(
        "LDA", "Fisher 1936; sums as in Fed3R", communication="second moments up, their basis down, once"
    )

    tolerance: ClassVar[float] = 1.25  # chosen by cross-entropy, bounded by squared errors

    def plan(self, problem: LinearProblem, candidates: Tensor) -> Tree:
        """Compute a basis in which the covariance is diagonal, and the classes in it."""
        means = class_means(problem)
        values, vectors = torch.linalg.eigh(within(problem, means))
        return {
            "basis": (problem.scale[:, None] * vectors).float(),
            "mean": problem.mean,
            "values": values.clamp_min(0),
            "means": means @ vectors,
            "prior": self.prior(problem),
            "counts": problem.counts,
            "weights": problem.weights,
            "candidates": candidates,
        }

    def decomposed(self, plan: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Give A, which is the covariance within classes and that of their means, and B: n_c mu_c."""
        means = plan["means"].T
        return plan["values"], means * plan["counts"].sqrt(), means * plan["counts"]

    def leave_one_out(self, plan: Tree, z: Tensor, labels: Tensor) -> Tensor:
        """Compute discriminants from means and covariance without the image, by a step of rank one.

        Without an image d from its class mean, n_c and n fall by one, the mean moves by -d / (n_c - 1) and S
        loses n_c / (n_c - 1) dd'.
        """
        n, class_counts = plan["counts"].sum(), plan["counts"][labels].clamp(min=2)
        inverse = (n - 1) / (plan["values"] + plan["candidates"][:, None])
        d, means = z - plan["means"][labels], plan["means"]
        rate = (class_counts / (class_counts - 1) / (n - 1))[:, None]
        truth = F.one_hot(labels, len(plan["counts"])).to(z)
        moved = truth / (class_counts - 1)[:, None]  # of class c's mean, along -d

        whitened = inverse[:, :, None] * means.T
        dd = (inverse @ d.square().T)[:, :, None]
        zd = (inverse @ (d * z).T)[:, :, None]
        along = d @ whitened
        dm = along - moved * dd
        zm = z @ whitened - moved * zd
        mm = (inverse @ means.square().T)[:, None] - 2 * moved * along + moved.square() * dd
        gain = rate / (1 - rate * dd).clamp_min(1e-6)
        return zm + gain * zd * dm - (mm + gain * dm.square()) / 2 + plan["prior"]

    def error(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the cross-entropy, as the model is one of probabilities."""
        return F.cross_entropy(logits, labels, reduction="none")

    def solve(self, problem: LinearProblem, lam: float) -> tuple[Tensor, Tensor]:
        """Compute M^-1 mu_c, and the constant term of every class."""
        means = class_means(problem)
        damped = within(problem, means) + lam * torch.eye(len(problem.mean)).to(problem.scatter)
        weight = problem.n * cholesky_solve(damped, means.T)
        return weight, self.prior(problem) - (means.T * weight).sum(0) / 2

    def prior(self, problem: LinearProblem) -> Tensor:
        """log(n_c / n), or alike for all classes; a class without images is as unlikely as half an image."""
        if self.balanced:
            return torch.zeros_like(problem.counts)
        return torch.log(problem.counts.clamp(min=0.5) / problem.n)


def class_means(problem: LinearProblem) -> Tensor:
    """Compute means of the standardised inputs by class (C, D); zero without images."""
    return (problem.targets / problem.counts.clamp(min=1)).T


def within(problem: LinearProblem, means: Tensor) -> Tensor:
    """Compute the scatter within classes (D, D)."""
    return problem.scatter - means.T @ (problem.counts[:, None] * means)
