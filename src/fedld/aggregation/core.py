"""`aggregate`: updates in, one update and a report out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedld.aggregation.gram import COLUMNS, combine, coordinates, gram, inner
from fedld.aggregation.inputs import (
    as_columns,
    as_groups,
    as_names,
    as_rule,
    as_source,
    as_weights,
    check_reference,
)
from fedld.aggregation.report import Alignment, Report, alignment, average_report, axes_report
from fedld.aggregation.rule import Array, CoordinateRule, Extras, GramRule, Rule
from fedld.aggregation.spectrum import spectrum
from fedld.errors import FedLDError


@dataclass(frozen=True)
class Aggregate:
    """The aggregate in the form the updates came in, and how it came about."""

    update: Any
    report: Report


@torch.no_grad()
def aggregate(
    updates: Any,
    sizes: Sequence[float],
    rule: str | Rule = "principal",
    *,
    granularity: str = "model",
    weights: str = "size",
    tensors: Sequence[tuple[str, int]] | None = None,
    clients: Sequence[str] | None = None,
    min_clients: int = 1,
    reference: torch.Tensor | None = None,
    block: int = COLUMNS,
    **options: Any,
) -> Aggregate:
    """Aggregate the clients' updates by a rule.

    updates      (m, d) tensor or array, state dicts, paths of .safetensors or .npy files, or a `Source`
    sizes        samples n_i of each client; p_i = n_i / n, or equal with weights = "uniform"
    rule         a name (then `options` are its options) or a rule
    granularity  one Gram matrix a "model", a "layer" (tensor name up to the last dot) or a "tensor"
    tensors      (name, length) of the tensors that make up the columns of a matrix
    clients      names for messages and the report
    min_clients  fewer clients with finite updates than this is an error
    reference    flat direction (d,) that the server remembers, for rules that rank clients by it (hgd)
    block        columns of one product, at most; results depend on it by rounding only

    >>> result = aggregate(torch.eye(2), [1, 3], "mean")
    >>> result.update, result.report.coefficients
    (tensor([0.2500, 0.7500]), {'model': [0.25, 0.75]})
    """
    rule = as_rule(rule, options)
    names = as_names(updates, clients)
    source = as_source(updates, tensors, names)
    p = as_weights(sizes, weights, names)
    groups, titles = as_groups(source, granularity)
    check_reference(source, reference)
    block = as_columns(block, source.clients)
    K, keep, rejected = _finite(gram(source, groups, block), names, min_clients)
    p = p[keep] / p[keep].sum()
    # Float32 products carry noise that must not pass for an axis or a conflict.
    precision = 1e-10 if source.dtype == torch.float64 else 1e-6
    c = np.empty((0, len(keep)))
    if isinstance(rule, GramRule):
        dots = [None] * len(K) if reference is None else inner(source, reference, groups, block)[:, keep]
        extras = [Extras(title, precision, dot) for title, dot in zip(titles, dots, strict=True)]
        c = np.stack([rule(k, p, extra) for k, extra in zip(K, extras, strict=True)])
        update, found = combine(source, c, groups, keep, block), alignment(K, c)
    else:
        assert isinstance(rule, CoordinateRule)
        update, found = coordinates(source, rule, p, keep, block)
    _check_overflow(update, found)
    whole = K.sum(axis=0)
    axes = spectrum(whole, precision)
    report = Report(
        clients=[names[i] for i in keep],
        weights=p.tolist(),
        rejected=rejected,
        coefficients={title: row.tolist() for title, row in zip(titles, c, strict=False)},
        **axes_report(axes, rule.kept(axes), p),
        **average_report(whole, p, found),
    )
    return Aggregate(source.wrap(update), report)


def _finite(K: Array, names: Sequence[str], least: int) -> tuple[Array, list[int], dict[str, str]]:
    """Without clients whose squared norm is not finite: they spoil only their own rows and columns of K."""
    squares = np.diagonal(K, axis1=1, axis2=2).sum(axis=0)
    rejected = {
        name: "its update holds NaN" if np.isnan(square) else "its update holds infinite or too large numbers"
        for name, square in zip(names, squares, strict=True)
        if not np.isfinite(square)
    }
    keep = np.flatnonzero(np.isfinite(squares)).tolist()
    if len(keep) < max(1, least):
        raise FedLDError(
            f"{max(1, least)} clients are needed, but only {len(keep)} have finite updates; "
            f"rejected: {', '.join(f'{name} ({reason})' for name, reason in rejected.items()) or 'none'}"
        )
    return K[:, keep][:, :, keep], keep, rejected


def _check_overflow(update: torch.Tensor, found: Alignment) -> None:
    """Error if the aggregate does not fit the updates' type; its length tells whether to look at all."""
    if np.sqrt(max(found.square, 0.0)) > torch.finfo(update.dtype).max and not bool(update.isfinite().all()):
        raise FedLDError(f"the aggregate is too large for {update.dtype}: pass the updates in a wider type")
