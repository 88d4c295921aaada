"""What sums over a client's samples can be: the server refuses the others before it adds anything.

With X the head's inputs with a one appended and Y the one-hot labels, A = X'X and T = X'Y of n samples obey:

- n is a whole number, at most the samples that the client described, and so are the counts by class;
- the columns of T add up to the last column of A, which is the sum of all inputs;
- where Y are other targets than classes, n and A alone are bounded;
- A - sum_c t_c t_c' / n_c, the scatter within classes, is positive semidefinite, and so A is;
- a mean square of an input is at most 2^16.

A client may still lie within these bounds: its sums can be those of other samples than it has.

What clients tell of errors beside their sums chooses among the regularisations that the sums hold for good:
those with a small generalised cross-validation error (Golub et al. 1979).
"""

import torch
from torch import Tensor

from fedld.layout import Tree
from fedld.methods.moments import symmetric

LARGEST_SQUARE = 2.0**16
"""Bound of the mean square of an input of the head."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Rounding errors of sums, as a share of their trace."""
EXACT = 1e-9
"""Share of |Y|^2 below which residuals are rounding errors."""


def sums_problem(message: Tree, samples: int, *, classes: bool = True) -> str | None:
    """Say why a message cannot hold the sums of a client's samples.

    Args:
        message: `moments` (the triangle of X'X, or one by class) and `targets` (X'Y), both or neither.
        samples: How many samples the client described.
        classes: Whether Y are one-hot labels; other targets are bounded by nothing.

    Returns:
        The reason, None if the sums are possible.

    >>> sums_problem({"moments": torch.tensor([4.0, 2.0, 2.0]), "targets": torch.tensor([[2.0], [2.0]])}, 2)
    >>> sums_problem({"moments": torch.tensor([4.0, 2.0, 2.0]), "targets": torch.tensor([[2.0], [2.0]])}, 1)
    'its sums are of 2 samples, and it described 1'
    """
    if not message.keys() & {"moments", "targets"}:
        return None
    if not message.keys() >= {"moments", "targets"}:
        return "it sent one kind of sums without the other"
    moments, targets = message["moments"], message["targets"]
    if not _fit(moments, targets):
        return "its sums have another shape than the model's head"
    rounding = ROUNDING[moments.dtype]
    moments = moments.double()
    if not classes:
        matrix = symmetric(moments)
        total = matrix[:, -1]
        return _counts_problem(total[-1:], samples) or _matrix_problem(
            matrix, total[:, None], total, rounding
        )
    targets = targets.double()
    problem = _counts_problem(targets[-1], samples)
    if problem is not None:
        return problem
    if moments.ndim == 1:
        return _matrix_problem(symmetric(moments), targets, targets.sum(1), rounding)
    for row, target in zip(moments, targets.T, strict=True):
        problem = _matrix_problem(symmetric(row), target[:, None], target, rounding)
        if problem is not None:
            return problem
    return None


def feature_sums_problem(message: Tree, samples: int) -> str | None:
    """Say why a message cannot hold the sums by which a head's inputs are standardised.

    Args:
        message: `sums`, of the inputs and of their squares (2, D), and `count`.
        samples: How many samples the client described.

    Returns:
        The reason, None if the sums are possible.
    """
    sums, count = message.get("sums"), message.get("count")
    if sums is None or count is None or sums.ndim != 2 or len(sums) != 2 or count.ndim:
        return "its sums have another shape than the model's head"
    if problem := _counts_problem(count[None], samples):
        return problem
    total, squares = sums.double()
    if bool((squares > LARGEST_SQUARE * count).any()):
        return f"its inputs have mean squares above {LARGEST_SQUARE:g}"
    if bool((total.square() > (1 + 1e-6) * count * squares + 1e-6).any()):
        return "its sums are not those of any samples"
    return None


def centre_sums_problem(message: Tree, samples: int) -> str | None:
    """Say why a message cannot hold the sums from which the means of trained layers' inputs are made.

    Args:
        message: `sums` of the inputs (D,), and `count`.
        samples: How many samples the client described.

    Returns:
        The reason, None if the sums are possible.
    """
    sums, count = message.get("sums"), message.get("count")
    if sums is None or count is None or sums.ndim != 1 or count.ndim:
        return "its sums have another shape than the inputs of the trained layers"
    if problem := _counts_problem(count[None], samples):
        return problem
    if bool((sums.double().square() > LARGEST_SQUARE * count.square()).any()):
        return f"its inputs have squared means above {LARGEST_SQUARE:g}"
    return None


def mean_length(message: Tree) -> float | None:
    """Give the root mean square length of the inputs behind a client's sums; None without sums."""
    if "moments" not in message:
        return None
    moments = message["moments"].double()
    matrix = symmetric(moments.sum(0) if moments.ndim == 2 else moments)
    return float((matrix.diagonal()[:-1].sum() / matrix[-1, -1]).sqrt())


def change_problem(moments: Tensor, change: Tensor, update: Tensor) -> str | None:
    """Say why `change` cannot be A_i D for a client's head update D, where A_i is a part of A = sum_i A_i.

    A_i <= A gives C' A^-1 C <= D' A_i D = D'C for C = A_i D (traces): the merged outputs move no more by this
    client than they would if all clients had made its update.

    Args:
        moments: A (D, D), positive definite.
        change: C (D, classes).
        update: D (D, classes).

    Returns:
        The reason, None if the change is possible.
    """
    moved = torch.cholesky_solve(change, torch.linalg.cholesky(moments))
    reported, used = (update * change).sum(), (moved * change).sum()
    if used > 1.05 * reported + 1e-12 * moments.diagonal().sum() * update.square().sum():
        return "its outputs changed by more than its update explains"
    return None


def generalised_errors(
    values: Tensor, factor: Tensor, targets: Tensor, *, squares: Tensor, n: Tensor, candidates: Tensor
) -> Tensor:
    """Give |Y - HY|^2 / (1 - tr H / n)^2 of ridge regression for every candidate (L,).

    H is the hat matrix with a bias, A = diag(values) + factor factor' and B = targets. The solution
    W = (A + lam I)^-1 B leaves |Y|^2 - tr B'W - lam tr W'W.

    Args:
        values: the diagonal part of A (D,).
        factor: its other part (D, R); no columns where A is diagonal.
        targets: B (D, C).
        squares: |Y|^2 of the centred targets.
        n: number of samples, or the sum of their weights.
        candidates: values of lam (L,).

    Returns:
        The errors; infinite where as many parameters as samples are fitted.

    >>> two, none = torch.tensor([2.0]), torch.zeros(1, 0)
    >>> generalised_errors(two, none, two[:, None], squares=two[0], n=2 * two[0], candidates=two)
    tensor([1.2800])
    """
    errors = []
    for lam in candidates:
        inverse = 1 / (values + lam)
        scaled = inverse[:, None] * factor
        inner = torch.linalg.inv(torch.eye(factor.shape[1]).to(factor) + factor.T @ scaled)
        weight = inverse[:, None] * targets - scaled @ (inner @ (scaled.T @ targets))
        residual = squares - (targets * weight).sum() - lam * weight.square().sum()
        trace = inverse.sum() - (inner * (scaled.T @ scaled)).sum()  # of (A + lam I)^-1
        free = 1 - (1 + len(values) - lam * trace) / n
        error = residual.clamp_min(EXACT * squares) / free.square()
        errors.append(torch.where(free > 0, error, torch.inf))
    return torch.stack(errors)


def _fit(moments: Tensor, targets: Tensor) -> bool:
    """Tell whether shapes and types belong together."""
    if targets.ndim != 2 or moments.ndim not in (1, 2) or moments.dtype not in ROUNDING:
        return False
    width, classes = targets.shape
    if moments.shape[-1] != width * (width + 1) // 2 or targets.dtype != moments.dtype:
        return False
    return moments.ndim == 1 or len(moments) == classes


def _counts_problem(counts: Tensor, samples: int) -> str | None:
    """Refuse numbers of samples by class that no client with `samples` samples has."""
    if bool((counts < 0).any()) or not bool(counts.eq(counts.round()).all()):
        return "its numbers of samples are no whole numbers"
    if not 0 < counts.sum() <= samples:
        return f"its sums are of {counts.sum():.0f} samples, and it described {samples}"
    return None


def _matrix_problem(A: Tensor, targets: Tensor, total: Tensor, rounding: float) -> str | None:
    """Refuse a matrix X'X that samples with these sums by class cannot have."""
    counts, allowed = targets[-1], rounding * (1 + A.diagonal().abs().sum())
    if bool(((A[-1] - total).abs() > allowed).any()) or A[-1, -1] != counts.sum():
        return "its second moments and its sums by class are of different samples"
    if bool((A.diagonal() > LARGEST_SQUARE * counts.sum().clamp(min=1)).any()):
        return f"its inputs have mean squares above {LARGEST_SQUARE:g}"
    within = A - (targets / counts.clamp(min=1)) @ targets.T
    absent = targets[:, counts == 0]
    damped = within + allowed * torch.eye(len(A)).to(A)
    if bool(absent.any()) or int(torch.linalg.cholesky_ex(damped).info) != 0:
        return "its second moments are not those of any samples"
    return None
