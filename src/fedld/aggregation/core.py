"""`aggregate`: updates in, one update and a report out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedld.aggregation.gram import COLUMNS, combine, gram, kept_rows, ranges
from fedld.aggregation.principal import Principal
from fedld.aggregation.report import Alignment, Report, alignment, average_report, axes_report
from fedld.aggregation.rule import Array, CoordinateRule, Extras, GramRule, Rule, make_rule
from fedld.aggregation.sources import Source, matrix_source, state_source
from fedld.aggregation.spectrum import spectrum
from fedld.errors import FedLDError, nearest

# How exact the Gram matrix is: float32 products carry noise that must not pass for an axis.
PRECISION = {torch.float64: 1e-10}


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
    block: int = COLUMNS,
    **options: Any,
) -> Aggregate:
    """Aggregate the clients' updates by a rule.

    updates      (m, d) tensor or array, a list of state dicts, or a `Source` (e.g. `FileSource`)
    sizes        samples n_i of each client; p_i = n_i / n, or equal with weights = "uniform"
    rule         a name (then `options` are its options) or a rule
    granularity  one Gram matrix a "model", a "layer" (tensor name up to the last dot) or a "tensor"
    tensors      (name, length) of the tensors that make up the columns of a matrix
    clients      names for messages and the report
    min_clients  fewer clients with finite updates than this is an error
    block        columns of one product; results depend on it by rounding only

    >>> result = aggregate(torch.eye(2), [1, 3], "mean")
    >>> result.update, result.report.coefficients
    (tensor([0.2500, 0.7500]), {'model': [0.25, 0.75]})
    """
    rule = _rule(rule, options)
    names = _names(updates, clients)
    source = _source(updates, tensors, names)
    p = _weights(sizes, weights, names)
    groups, titles = _groups(source, granularity)
    K, keep, rejected = _finite(gram(source, groups, block), names)
    if len(keep) < max(1, min_clients):
        raise FedLDError(
            f"{len(keep)} clients have finite updates, {max(1, min_clients)} are needed: {rejected}"
        )
    p = p[keep] / p[keep].sum()
    precision = PRECISION.get(source.dtype, 1e-6)
    c = np.zeros((0, len(keep)))
    if isinstance(rule, GramRule):
        extras = [Extras(title, precision) for title in titles]
        c = np.stack([rule(k, p, extra) for k, extra in zip(K, extras, strict=True)])
        update, found = combine(source, c, groups, keep, block), alignment(K, c)
    else:
        assert isinstance(rule, CoordinateRule)
        update, found = _coordinates(source, rule, p, keep, block)
    whole = K.sum(axis=0)
    axes = spectrum(whole, precision)
    report = Report(
        clients=[names[i] for i in keep],
        weights=p.tolist(),
        rejected=rejected,
        coefficients={title: row.tolist() for title, row in zip(titles, c, strict=False)},
        **axes_report(axes, rule.kept(axes) if isinstance(rule, Principal) else axes.rank, p),
        **average_report(whole, p, found),
    )
    return Aggregate(source.wrap(update), report)


def _rule(rule: str | Rule, options: Mapping[str, Any]) -> Rule:
    if isinstance(rule, str):
        return make_rule(rule, **options)
    if options:
        raise FedLDError(f"options {sorted(options)} belong to a rule given by name, not to a Rule value")
    return rule


def _names(updates: Any, clients: Sequence[str] | None) -> list[str]:
    m = updates.clients if isinstance(updates, Source) else len(updates)
    if m == 0:
        raise FedLDError("there are no updates to aggregate")
    names = [str(i) for i in range(m)] if clients is None else list(clients)
    if len(names) != m:
        raise FedLDError(f"{len(names)} client names for {m} updates")
    return names


def _source(updates: Any, tensors: Sequence[tuple[str, int]] | None, names: Sequence[str]) -> Source:
    if isinstance(updates, Source):
        return updates
    if isinstance(updates, torch.Tensor | np.ndarray):
        return matrix_source(updates, tensors)
    if all(isinstance(state, Mapping) for state in updates):
        return state_source(updates, names)
    raise FedLDError(
        f"updates must be a matrix, a list of state dicts or a source, not {type(updates).__name__}"
    )


def _weights(sizes: Sequence[float], weights: str, names: Sequence[str]) -> Array:
    if weights not in ("size", "uniform"):
        raise FedLDError(f"weights = {weights!r} is not valid: {nearest(str(weights), ['size', 'uniform'])}")
    n = np.asarray(sizes, dtype=np.float64)
    if n.shape != (len(names),):
        raise FedLDError(f"{n.size} sizes for {len(names)} updates")
    for name, size in zip(names, n, strict=True):
        if not (np.isfinite(size) and size > 0):
            raise FedLDError(f"client '{name}' has size {size:g}: sizes must be positive")
    return np.full(len(n), 1 / len(n)) if weights == "uniform" else n / n.sum()


def _groups(source: Source, granularity: str) -> tuple[list[int], list[str]]:
    """Group of each tensor, and the groups' names."""
    titles = {
        "model": ["model"] * len(source.specs),
        "layer": [spec.layer for spec in source.specs],
        "tensor": [spec.name for spec in source.specs],
    }
    if granularity not in titles:
        raise FedLDError(f"granularity = {granularity!r} is not valid: {nearest(granularity, list(titles))}")
    names = titles[granularity]
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names], order


def _finite(K: Array, names: Sequence[str]) -> tuple[Array, list[int], dict[str, str]]:
    """Without clients whose squared norm is not finite: they spoil only their own rows and columns of K."""
    squares = np.diagonal(K.sum(axis=0))
    rejected = {
        name: "its update holds NaN" if np.isnan(square) else "its update is infinite"
        for name, square in zip(names, squares, strict=True)
        if not np.isfinite(square)
    }
    keep = np.flatnonzero(np.isfinite(squares)).tolist()
    return K[:, keep][:, :, keep], keep, rejected


def _coordinates(
    source: Source, rule: CoordinateRule, p: Array, keep: Sequence[int], columns: int
) -> tuple[torch.Tensor, Alignment]:
    """Aggregate of a rule outside Gram space, with its inner products gathered on the way."""
    out = torch.empty(sum(spec.size for spec in source.specs), dtype=source.dtype, device=source.device)
    weights = torch.from_numpy(p).to(source.device)
    square, dots, position = 0.0, np.zeros(len(keep)), 0
    for index, start, stop in ranges(source, columns):
        block = kept_rows(source.read(index, start, stop), keep)
        piece = rule(block, weights)
        out[position : position + stop - start] = piece
        square += float(piece.double() @ piece.double())
        dots += (block.double() @ piece.double()).cpu().numpy()
        position += stop - start
    return out, Alignment(square, dots)
