"""Sums that a lying client sends: what no samples can have is refused, what samples have is accepted."""

import pytest
import torch
import torch.nn.functional as F

from fedld.methods.moments import symmetric, triangle
from fedld.methods.sum_bounds import change_problem, feature_sums_problem, mean_length, sums_problem

CLASSES = 3


def features(samples, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, width, generator=generator, dtype=torch.float64).relu() * 3
    labels = torch.randint(0, 2, (samples,), generator=generator)  # of the third class there is nothing
    return F.pad(x, (0, 1), value=1.0), F.one_hot(labels, CLASSES).double()


def sums(X, Y, *, by_class=False, dtype=torch.float64):
    rows = [triangle(X[Y[:, c] > 0].T @ X[Y[:, c] > 0]) for c in range(CLASSES)]
    moments = torch.stack(rows) if by_class else triangle(X.T @ X)
    return {"moments": moments.to(dtype), "targets": (X.T @ Y).to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize(("samples", "width"), [(200, 6), (5, 40), (1, 3), (3000, 64)])
def test_sums_of_samples_are_accepted(samples, width, by_class, dtype):
    message = sums(*features(samples, width), by_class=by_class, dtype=dtype)
    assert sums_problem(message, samples) is None
    assert (
        sums_problem(message, samples - 1)
        == f"its sums are of {samples} samples, and it described {samples - 1}"
    )


def indefinite(message):
    """A direction in which inputs would have a negative square."""
    A = symmetric(message["moments"])
    A[0, 0] -= A.diagonal().sum()
    return {**message, "moments": triangle(A)}


def far_means(message):
    """Classes further apart than the spread of all inputs allows."""
    apart = torch.zeros_like(message["targets"])
    apart[0, 0], apart[0, 1] = 1e4, -1e4
    return {**message, "targets": message["targets"] + apart}


def halves(message):
    targets = message["targets"].clone()
    targets[-1, 0] += 0.5
    targets[-1, 1] -= 0.5
    return {**message, "targets": targets}


def absent_class(message):
    targets = message["targets"].clone()
    targets[0, 2], targets[0, 0] = 1.0, targets[0, 0] - 1
    return {**message, "targets": targets}


LIES = {
    "indefinite": (indefinite, "not those of any samples"),
    "far means": (far_means, "not those of any samples"),
    "halves": (halves, "no whole numbers"),
    "absent class": (absent_class, "not those of any samples"),
    "larger inputs": (lambda m: {**m, "moments": m["moments"] * 2}, "of different samples"),
    "more inputs": (lambda m: {key: value * 1e9 for key, value in m.items()}, "described 200"),
    "other sums": (lambda m: {**m, "targets": m["targets"] + torch.eye(7, 3)}, "of different samples"),
    "huge inputs": (lambda m: huge(), "mean squares above 65536"),
    "one kind": (lambda m: {"moments": m["moments"]}, "without the other"),
    "another head": (lambda m: {**m, "moments": m["moments"][:-1]}, "another shape"),
    "whole numbers": (lambda m: {key: value.long() for key, value in m.items()}, "another shape"),
}


def huge():
    X, Y = features(200, 6)
    return sums(X * torch.tensor([1e3] * 6 + [1.0]), Y)


@pytest.mark.parametrize("lie", LIES)
def test_sums_of_no_samples_are_refused(lie):
    change, reason = LIES[lie]
    assert reason in sums_problem(change(sums(*features(200, 6))), 200)


def test_sums_by_class_are_looked_at_one_by_one():
    """Two classes that outweigh each other's lie in the sum."""
    message = sums(*features(200, 6), by_class=True)
    size = symmetric(message["moments"][0]).diagonal().sum()
    lie = triangle(torch.diag(torch.tensor([1.0] + [0.0] * 6, dtype=torch.float64))) * size
    moments = message["moments"] + torch.stack([-lie, lie, 0 * lie])
    assert "not those of any samples" in sums_problem({**message, "moments": moments}, 200)


def test_lengths_of_inputs_do_not_depend_on_the_number_of_samples():
    few, many = (mean_length(sums(*features(n, 8))) for n in (400, 4000))
    assert few == pytest.approx(many, rel=0.1)
    assert mean_length(sums(*features(400, 8), by_class=True)) == pytest.approx(few)
    assert mean_length({}) is None


def test_a_change_of_outputs_is_explained_by_the_update():
    parts = [features(60, 5, seed)[0] for seed in range(4)]
    A = sum(X.T @ X for X in parts)
    A = A + 1e-10 * A.diagonal().sum() * torch.eye(6, dtype=torch.float64)
    update = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for X in parts:
        change = (X.T @ X @ update).float().double()
        assert change_problem(A, change, update) is None
        for lie in (-change, 10 * change, change.flip(0)):
            assert "more than its update explains" in change_problem(A, lie, update)
    assert change_problem(A, torch.zeros_like(update), torch.zeros_like(update)) is None


def test_sums_that_standardise_inputs():
    X = features(50, 4)[0][:, :-1]
    good = {"sums": torch.stack([X.sum(0), X.square().sum(0)]), "count": torch.tensor(50.0).double()}
    assert feature_sums_problem(good, 50) is None
    lies = {
        "described 49": (good, 49),
        "not those": ({**good, "sums": good["sums"] * torch.tensor([[10.0], [1.0]])}, 50),
        "above": ({**good, "sums": good["sums"] * 1e6}, 50),
        "whole": ({**good, "count": torch.tensor(0.5).double()}, 50),
        "shape": ({"sums": good["sums"]}, 50),
    }
    for reason, (message, samples) in lies.items():
        assert reason in feature_sums_problem(message, samples)


def test_sums_with_other_targets_than_classes():
    X, _ = features(200, 6)
    message = {"moments": triangle(X.T @ X), "targets": X.T @ torch.linspace(-2, 3, 200).double()[:, None]}
    assert sums_problem(message, 200, classes=False) is None
    assert "described 199" in sums_problem(message, 199, classes=False)
    assert "not those of any samples" in sums_problem(indefinite(message), 200, classes=False)
