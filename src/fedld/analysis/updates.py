"""How different the clients' updates are, from their Gram matrix: cosines, conflicts, opposed groups.

The axes' part (spectrum, votes, gap, margin) is the aggregation's own `Report`; it is not computed twice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedld.aggregation.inputs import outliers
from fedld.aggregation.report import Report, alignment, average_report, axes_report
from fedld.aggregation.rule import spectrum
from fedld.errors import FedLDError
from fedld.records.schema import ConflictLine, TrialRecord
from fedld.records.tables import gram_clients

Floats = NDArray[np.float64]
MOST = 200  # clients whose pairs are compared over rounds


@dataclass(frozen=True, kw_only=True)
class UpdateMeasures:
    """Differences of the clients' updates in one round; `report` holds the aggregate's and the axes' part."""

    report: Report
    pairwise_cosine: Floats  # (m, m), 0 for a zero update
    mean_cosine: float  # over pairs; 1 for one client
    conflict_rate: float  # share of pairs with a cosine below -`tolerance`
    b_dissimilarity: float  # B^2 = sum p_i |g_i|^2 / |sum p_i g_i|^2 (FedProx, Def. 3); inf if they cancel
    cancellation: float  # |sum p_i g_i|^2 / sum p_i^2 |g_i|^2: 1 if orthogonal, below 1 if they cancel


def update_measures(report: Report, tolerance: float = 0.0) -> UpdateMeasures:
    """Compute measures of the updates behind an aggregation's report."""
    K, p = np.asarray(report.gram), np.asarray(report.weights)
    cosine = pairwise_cosine(K)
    pairs = cosine[np.triu_indices(len(p), 1)]
    average, squares = float(p @ K @ p), np.diagonal(K)
    return UpdateMeasures(
        report=report,
        pairwise_cosine=cosine,
        mean_cosine=float(pairs.mean()) if len(pairs) else 1.0,
        conflict_rate=float((pairs < -tolerance).mean()) if len(pairs) else 0.0,
        b_dissimilarity=_ratio(float(p @ squares), average) ** 0.5,
        cancellation=_ratio(average, float(p**2 @ squares)),
    )


def gram_report(
    gram: ArrayLike,
    weights: ArrayLike,
    coefficients: ArrayLike | None = None,
    *,
    kept: int | None = None,
    clients: Sequence[str] | None = None,
) -> Report:
    """Report an aggregate G c (default: the plain average) where only the Gram matrix was recorded."""
    K, p = np.asarray(gram, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if p.ndim != 1 or K.shape != (len(p), len(p)) or not (np.isfinite(K).all() and p.sum() > 0):
        raise FedLDError(f"a finite Gram matrix (m, m) and m weights are needed, got {K.shape} and {p.shape}")
    p = p / p.sum()
    c = p if coefficients is None else np.asarray(coefficients, dtype=np.float64)
    axes = spectrum(K)
    names = [str(i) for i in range(len(p))] if clients is None else list(clients)
    return Report(
        clients=names,
        weights=p.tolist(),
        rejected={},
        capped={},
        outliers=outliers(K, names),
        coefficients={"model": c.tolist()},
        **axes_report(axes, axes.rank if kept is None else min(kept, axes.rank), p),
        **average_report(K, p, alignment(K[None], c[None])),
    )


def pairwise_cosine(K: Floats) -> Floats:
    """Compute (m, m) cosines between updates; 0 with a zero update."""
    norms = np.sqrt(np.diagonal(K))
    scale = np.outer(norms, norms)
    return np.asarray(np.divide(K, scale, out=np.zeros_like(K), where=scale > 0))


@dataclass(frozen=True, kw_only=True)
class Split:
    """Clients on the two sides of the updates' first axis, the heavier side first."""

    majority: tuple[str, ...]
    minority: tuple[str, ...]
    minority_weight: float
    within: float  # mean cosine of pairs on one side (nan if both sides are single clients)
    between: float  # mean cosine of pairs across


def split(reports: Sequence[ConflictLine]) -> Split | None:
    """Divide clients along the first axis of their mean pairwise cosines over the recorded rounds.

    The mean over rounds keeps lasting opposition and loses one round's noise. None if all are on one side.
    """
    names, cosine, weight = mean_cosines(reports)
    side = spectrum(cosine).votes(1)[:, 0]
    if not ((side > 0).any() and (side < 0).any()):
        return None
    if weight[side > 0].sum() < weight[side < 0].sum():
        side = -side
    pairs = np.triu_indices(len(names), 1)
    sign, values = (side[:, None] * side[None])[pairs], cosine[pairs]
    return Split(
        majority=tuple(name for name, s in zip(names, side, strict=True) if s > 0),
        minority=tuple(name for name, s in zip(names, side, strict=True) if s < 0),
        minority_weight=float(weight[side < 0].sum() / weight.sum()),
        within=float(values[sign > 0].mean()) if (sign > 0).any() else float("nan"),
        between=float(values[sign < 0].mean()),
    )


def mean_cosines(reports: Sequence[ConflictLine]) -> tuple[list[str], Floats, Floats]:
    """Average pairwise cosines (0 for pairs never sampled together) and weights over rounds, by client.

    Of thousands of clients those that were there most often are looked at: few others ever met.
    """
    met = Counter(name for report in reports for name in gram_clients(report)[0])
    often = {name for name, _ in met.most_common(MOST)}
    names = [name for name in met if name in often]
    place = {name: k for k, name in enumerate(names)}
    total, seen = np.zeros((2, len(names), len(names)))
    weight = np.zeros(len(names))
    for report in reports:
        clients, weights = gram_clients(report)
        there = [k for k, name in enumerate(clients) if name in place]
        rows = [place[clients[k]] for k in there]
        total[np.ix_(rows, rows)] += pairwise_cosine(np.asarray(report["gram"]))[np.ix_(there, there)]
        seen[np.ix_(rows, rows)] += 1
        weight[rows] += np.asarray(weights)[there]
    cosine = np.divide(total, seen, out=np.zeros_like(total), where=seen > 0)
    return names, cosine, weight / np.maximum(np.diagonal(seen), 1)


def chosen_step(trial: TrialRecord) -> str:
    """Describe the step that clients measured as best: its rule, and its length relative to the rule's."""
    if not trial["chosen"]:
        return "the plain average"
    return f"{trial['rules'][trial['chosen']]} at {trial['lengths'][trial['chosen']]:g} times its length"


def _ratio(a: float, b: float) -> float:
    """Divide a by b; inf for a vanishing b, and 1 (all alike) if both vanish."""
    if b > 0:
        return a / b
    return 1.0 if a <= 0 else float("inf")
