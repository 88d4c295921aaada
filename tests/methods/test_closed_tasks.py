"""Closed forms of regression, several labels and survival: the pooled answer, however samples are dealt."""

import numpy as np
import pytest
import torch
from torch import nn

from fedld.errors import FedLDError
from fedld.local.base import TaskObjective
from fedld.methods.newton import CoxNewton, Newton, cox_derivatives
from fedld.methods.ridge import Ridge
from fedld.models.base import Block, Model
from fedld.tasks.classification import Multilabel
from fedld.tasks.regression import Regression
from fedld.tasks.survival import Survival, partial_likelihood

N, D = 90, 3


class Head(Model):
    """A linear head for features as they are."""

    def __init__(self, outputs=1):
        super().__init__()
        self.fc = nn.Linear(D, outputs).double()
        self.blocks = (Block("fc", ("fc",)),)


def patients():
    """Features of unequal scale and their linear risk."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(N, D)) * [1.0, 3.0, 0.5] + [0.0, 2.0, -1.0]
    risk = x @ [0.8, -0.2, 0.6]
    times = rng.exponential(np.exp(-risk))
    events = rng.random(N) < 0.7
    return torch.from_numpy(x), torch.from_numpy(risk), torch.from_numpy(np.stack([times, events], 1))


PARTS = {
    "whole": [torch.arange(N)],
    "three": [torch.arange(N)[k::3] for k in range(3)],
    "uneven": [torch.arange(5), torch.arange(5, 60), torch.arange(60, N)],
}


def targets_of(task):
    _, risk, survival = patients()
    if task.name == "regression":
        return task.fitted([task.target_sums(risk.numpy())], ["value"]), risk
    if task.name == "multilabel":
        return task, torch.stack([risk > 0, survival[:, 0] > 1], 1).double()
    return task, survival


@pytest.mark.parametrize("task", [Regression(), Multilabel()], ids=["regression", "multilabel"])
def test_least_squares_is_the_same_however_samples_are_dealt(dealt, task):
    x, (task, targets) = patients()[0], targets_of(task)
    method = Ridge(objective=TaskObjective(task))
    outputs = targets.shape[1] if targets.ndim == 2 else 1
    heads, choices = [], []
    for parts in PARTS.values():
        federation = dealt(method, Head(outputs), x, targets, parts)
        federation.round()
        heads.append(federation.server.weights)
        choices.append(method.choices(federation.server))
    assert all((head - heads[0]).abs().max() < 1e-10 for head in heads)
    assert choices[0] == choices[1] == choices[2]
    assert choices[0]["lam"] == lam_by_refitting(method, x, targets, outputs)
    assert (choices[0]["temperature"] == 1) == (task.name == "regression")


def lam_by_refitting(method, x, targets, outputs):
    """The regularisation of the least leave-one-out error, every sample left out by hand."""
    z = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)
    codes = method.codes.of(targets, outputs)
    errors = {}
    for lam in (N * 2.0 ** torch.arange(-12, 4, dtype=torch.float64)).tolist():
        total = 0.0
        for i in range(N):
            rest = torch.arange(N) != i
            centre, level = z[rest].mean(0), codes[rest].mean(0)
            A = (z[rest] - centre).T @ (z[rest] - centre) + lam * torch.eye(D)
            weight = torch.linalg.solve(A, (z[rest] - centre).T @ (codes[rest] - level))
            total += (codes[i] - level - (z[i] - centre) @ weight).square().sum().item()
        errors[lam] = total
    return min(errors, key=errors.__getitem__)


def test_least_squares_recovers_a_linear_target(dealt):
    x, (task, targets) = patients()[0], targets_of(Regression())
    federation = dealt(Ridge(objective=TaskObjective(task), lam=1e-9), Head(), x, targets, PARTS["three"])
    with pytest.warns(UserWarning, match="leaves the sums singular"):
        federation.round()
    weights = federation.server.weights
    values = (x @ weights[:D] + weights[D]) * task.deviation + task.mean
    assert (values - targets).abs().max() < 1e-6


def test_unknown_labels_have_no_closed_form(dealt):
    x, (task, targets) = patients()[0], targets_of(Multilabel())
    targets[3, 1] = -1
    federation = dealt(Ridge(objective=TaskObjective(task)), Head(2), x, targets, PARTS["whole"])
    with pytest.raises(FedLDError, match="1 labels are unknown here"):
        federation.round()


def test_cox_derivatives_are_those_of_the_loss():
    x, _, targets = patients()
    targets[:, 0] = torch.ceil(3 * targets[:, 0])  # many ties
    weights = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64, requires_grad=True)

    def loss(w):
        return partial_likelihood(x @ w, targets).sum()

    value, gradient, hessian = cox_derivatives(x, targets, weights.detach())
    assert value.item() == pytest.approx(loss(weights).item(), abs=1e-10)
    assert (gradient - torch.autograd.grad(loss(weights), weights)[0]).abs().max() < 1e-10
    assert (hessian - torch.autograd.functional.hessian(loss, weights)).abs().max() < 1e-9


LIFELINES = [0.8662475626895205, -0.23152065790028933, 0.8858641529388779]
"""Coefficients of lifelines 0.30.3, CoxPHFitter(penalizer=0).fit(..., strata="site"), on these patients."""


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_newton_is_pooled_stratified_cox_regression(dealt, order):
    x, _, targets = patients()
    shuffled = [torch.from_numpy(np.random.default_rng(k).permutation(PARTS["three"][k])) for k in order]
    method = CoxNewton.of(Newton(lam=1e-14), Survival())
    federation = dealt(method, Head(), x, targets, shuffled)
    for _ in range(12):
        federation.round()
    assert federation.server.extra["cox"].tolist() == pytest.approx(LIFELINES, abs=1e-8)
    assert federation.server.weights[:D].tolist() == pytest.approx(LIFELINES, abs=1e-6)
