"""What an aggregation did, in plain numbers that all follow from the Gram matrices, without another pass."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedld.aggregation.inputs import Outlier
from fedld.aggregation.measured import Trial
from fedld.aggregation.rule import Array, Rule, Spectrum, spectrum
from fedld.aggregation.sketch import CountSketch


@dataclass(frozen=True)
class SketchError:
    """A sketched Gram matrix and what its halves, each a sketch of half as many buckets, say of its error.

    Of updates that the server does not see there are no halves: `gram` is then the expected error.
    """

    buckets: int
    seed: int
    gram: float  # root mean square over pairs of the error of <g_i, g_j> / (|g_i| |g_j|)
    update: float | None = None  # error of the aggregate, relative to its length; None: not known


@dataclass(frozen=True, kw_only=True)
class Report:
    """Diagnostics of one aggregation; per-client lists follow `clients`, per-axis lists the kept axes.

    A small `norm_ratio`, a negative `cosine` or a first axis with many votes against it are the signs of
    opposed groups of clients, on which the published rule shrinks or reverses the step.
    """

    clients: list[str]  # those that took part
    weights: list[float]  # p
    rejected: dict[str, str]  # client: reason
    capped: dict[str, float]  # client: the share it claimed, where it was given less
    outliers: list[Outlier]  # clients with an unusual length or direction
    coefficients: dict[str, list[float]]  # group: c (empty for rules outside Gram space)
    norms: list[float]  # |g_i|
    cosines: list[float]  # of g_i with the aggregate
    norm_ratio: float  # |aggregate| / |plain average|
    cosine: float  # of the aggregate with the plain average
    eigenvalues: list[float]  # of the whole model's Gram matrix, largest first
    kept: int  # axes used (all that exist, for rules without axes)
    kept_energy: float  # their share of the sum of eigenvalues
    votes_for: list[int]  # clients along the axis, which points to the mean update
    votes_against: list[int]
    weight_for: list[float]  # the same votes, weighted by p
    weight_against: list[float]
    eigen_gap: float  # min (lambda_l - lambda_l+1) / lambda_1: near 0 the axes are not unique
    sign_margin: float  # min |<g_i, u_l>| / |g_i|: near 0 a vote may flip
    gram: list[list[float]]  # whole model
    trial: Trial | None = None  # what the clients measured, under the rule `measured`
    sketch: SketchError | None = None  # None: the Gram matrices are exact

    def scaled(self, factor: float) -> "Report":
        """Give the report on an aggregate `factor` times as long (positive: angles stay)."""
        longer = {group: [factor * c for c in row] for group, row in self.coefficients.items()}
        return replace(self, coefficients=longer, norm_ratio=factor * self.norm_ratio)

    def to_json(self) -> dict[str, Any]:
        """Give the same as a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Alignment:
    """Inner products of the aggregate: with itself and with every client."""

    square: float
    dots: Array


def alignment(K: Array, c: Array) -> Alignment:
    """Compute |u|^2 = sum c_b'K_b c_b, <u, g_i> = sum (K_b c_b)_i of an aggregate G_b c_b by groups b."""
    products = np.einsum("bij,bj->bi", K, c)
    return Alignment(float(np.sum(products * c)), products.sum(axis=0))


def sketch_error(
    sketch: CountSketch, K: Array, c: Array, halves: Sequence[Array], coefficients: Sequence[Array]
) -> SketchError:
    """Estimate the error of a mean of two independent estimates: about half their difference.

    That holds for K and for the aggregate: |G (a - b)| / (2 |G c|) if the halves give coefficients a and b.
    """
    first, second = (half.sum(axis=0) for half in halves)
    lengths = np.sqrt(np.diagonal(K.sum(axis=0)))
    scale = np.outer(lengths, lengths)
    errors = np.divide(first - second, 2 * scale, out=np.zeros_like(scale), where=scale > 0)
    update = 0.0
    if len(coefficients):
        squares = (alignment(K, x).square for x in (coefficients[0] - coefficients[1], c))
        away, length = (float(np.sqrt(max(square, 0.0))) for square in squares)
        update = _ratio(away / 2, length)
    return SketchError(sketch.buckets, sketch.seed, float(np.sqrt(np.mean(errors**2))), update)


def make_report(rule: Rule, K: Array, p: Array, aligned: Alignment, precision: float, **facts: Any) -> Report:
    """Make the report from the whole model's K, the weights and the aggregate's inner products."""
    axes = spectrum(K, precision)
    return Report(
        weights=p.tolist(), **facts, **axes_report(axes, rule.kept(axes), p), **average_report(K, p, aligned)
    )


def axes_report(axes: Spectrum, kept: int, p: Array) -> dict[str, Any]:
    """Describe eigenvalues, energy, votes, gap and margin."""
    values, total = axes.values, axes.values.sum()
    votes = axes.votes(kept) * axes.orientation(kept)
    margins = np.abs(axes.projections(kept))[axes.norms > 0] / axes.norms[axes.norms > 0, None]
    gaps = (values[:kept] - np.append(values, 0.0)[1 : kept + 1]) / (values[0] or 1.0)
    return {
        "eigenvalues": values.tolist(),
        "kept": kept,
        "kept_energy": float(values[:kept].sum() / total) if total > 0 else 0.0,
        "votes_for": (votes > 0).sum(axis=0).tolist(),
        "votes_against": (votes < 0).sum(axis=0).tolist(),
        "weight_for": (p @ (votes > 0)).tolist(),
        "weight_against": (p @ (votes < 0)).tolist(),
        "eigen_gap": float(gaps.min(initial=1.0)),
        "sign_margin": float(margins.min(initial=1.0)),
    }


def average_report(K: Array, p: Array, aligned: Alignment) -> dict[str, Any]:
    """Give lengths and angles of the aggregate against the plain average and every client."""
    norms = np.sqrt(np.diagonal(K))
    average, length = float(np.sqrt(max(float(p @ K @ p), 0.0))), float(np.sqrt(max(aligned.square, 0.0)))
    return {
        "norms": norms.tolist(),
        "cosines": [_ratio(dot, length * norm) for dot, norm in zip(aligned.dots, norms, strict=True)],
        "norm_ratio": _ratio(length, average),
        "cosine": _ratio(float(p @ aligned.dots), length * average),
        "gram": K.tolist(),
    }


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b > 0 else 0.0
