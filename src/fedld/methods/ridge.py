from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.local import LocalClient
from fedld.methods.base import Card
from fedld.methods.closed import ClosedForm, cholesky_solve
from fedld.methods.moments import LinearProblem, client_sums


@dataclass(frozen=True)
class Ridge(ClosedForm):
    """Least squares on one-hot labels, from sums: the pooled solution in one round (Fed3R, AFL).

    Of a regression the standardised targets take their place, of several labels +0.5 and -0.5.

    W = (A + lam I)^-1 B for standardised inputs, A = sum z z', B = sum z y'; the bias is not regularised.
    With leverage h = z'(A + lam I)^-1 z + 1/n and error e, an image's leave-one-out error is e / (1 - h).
    """

    card: ClassVar[Card] = Card(
        "Ridge", "Fani et al. 2024 (Fed3R)", communication="second moments up, their basis down, once"
    )

    def sums(self, client: LocalClient) -> Tree:
        """Compute X'X, for balanced classes one for each of them, and X'Y."""
        dtype = getattr(torch, self.precision)
        if not self.codes.classes and self.balanced:
            raise FedLDError(f"balanced is for classes, and {self.codes.task.name} has none")
        return client_sums(client, self.codes, by_class=self.balanced, dtype=dtype)

    def problem(self, sums: Tree) -> LinearProblem:
        """Set up the linear problem, weighted by class where asked."""
        return LinearProblem.of(sums, balanced=self.balanced)

    def plan(self, problem: LinearProblem, candidates: Tensor) -> Tree:
        """Compute a basis in which (A + lam I)^-1 is diagonal for all candidates."""
        if len(candidates) > 1:
            values, vectors = torch.linalg.eigh(problem.scatter)
        else:
            damped = problem.scatter + candidates * torch.eye(len(problem.mean)).to(problem.scatter)
            root = torch.linalg.cholesky(damped)
            vectors = torch.linalg.solve_triangular(root, torch.eye(len(root)).to(root), upper=False).T
            values, candidates = torch.zeros(len(root)).to(root), torch.ones(1).to(root)
        plan = {
            "basis": (problem.scale[:, None] * vectors).float(),
            "mean": problem.mean,
            "values": values.clamp_min(0),
            "targets": vectors.T @ problem.targets,
            "counts": problem.counts,
            "weights": problem.weights,
            "candidates": candidates,
        }
        return plan if self.codes.classes else {**plan, "n": problem.n}

    def decomposed(self, plan: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """Give A, which is diagonal in its own basis, and B."""
        return plan["values"], plan["values"].new_zeros(len(plan["values"]), 0), plan["targets"]

    def leave_one_out(self, plan: Tree, z: Tensor, labels: Tensor) -> Tensor:
        """y - e / (1 - h)."""
        inverse = 1 / (plan["values"] + plan["candidates"][:, None])
        n = plan["counts"].sum() if self.codes.classes else plan["n"]
        fitted = plan["counts"] / n + z @ (inverse[:, :, None] * plan["targets"])
        leverage = 1 / n + inverse @ z.square().T
        if self.codes.classes:
            leverage = plan["weights"][labels] * leverage
        truth = self.codes.of(labels, len(plan["counts"])).to(z)
        return truth - (truth - fitted) / (1 - leverage).clamp_min(1e-6)[:, :, None]

    def error(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the squared error."""
        return (self.codes.of(labels, logits.shape[1]) - logits).square().sum(1)

    def solve(self, problem: LinearProblem, lam: float) -> tuple[Tensor, Tensor]:
        """Solve (A + lam I)^-1 B, with the shares of the classes."""
        damped = problem.scatter + lam * torch.eye(len(problem.mean)).to(problem.scatter)
        return cholesky_solve(damped, problem.targets), problem.counts / problem.n
