"""`aggregate`: updates in, one update and a report out; also for updates that the server does not see.

Of those the server has the Gram matrix alone. The coefficients c follow from K and p; others add up G c, in
a secure sum with the weights c_i, and give the sum back for the report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fedld.aggregation.gram import COLUMNS, Grams, combine, coordinates, inner, sketched_gram
from fedld.aggregation.gram import gram as exact_gram
from fedld.aggregation.inputs import (
    as_groups,
    as_names,
    as_rule,
    as_sketch,
    as_source,
    as_weights,
    check_block,
    check_bounds,
    check_reference,
    outliers,
    screen,
)
from fedld.aggregation.measured import Candidates, Trial
from fedld.aggregation.report import Alignment, Report, SketchError, alignment, make_report, sketch_error
from fedld.aggregation.robust import capped, weighted_mean, weighted_median
from fedld.aggregation.rule import Array, CoordinateRule, Extras, GramRule, Rule
from fedld.aggregation.sketch import CountSketch
from fedld.aggregation.sources import Source
from fedld.errors import FedLDError


@dataclass(frozen=True)
class Aggregate:
    """The aggregate in the form the updates came in, and how it came about."""

    update: Any
    diagnostics: Report | None
    rule: Rule
    candidates: Candidates | None = None  # steps that clients are to measure before one is taken

    def location(self, values: torch.Tensor) -> torch.Tensor:
        """Combine (m, b) numbers that the clients sent beside their updates to one row: see `location_of`."""
        return location_of(self.rule, values, torch.tensor(self.report.weights, dtype=torch.float64))

    def scaled(self, factor: float) -> "Aggregate":
        """Give a step that is `factor` times as long, and says so."""
        return replace(self, update=factor * self.update, diagnostics=self.report.scaled(factor))

    def without(self, refused: Mapping[str, str]) -> "Aggregate":
        """Give the same aggregate; its report also names clients that were refused before it was computed."""
        rejected = {**refused, **self.report.rejected}
        return replace(self, diagnostics=replace(self.report, rejected=rejected)) if refused else self

    @property
    def report(self) -> Report:
        """The diagnostics, if they were asked for."""
        if self.diagnostics is None:
            raise FedLDError("there is no report: the updates were aggregated with report=False")
        return self.diagnostics


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
    trial: Trial | None = None,
    propose: bool = False,
    max_weight: float | None = None,
    max_update_ratio: float | None = None,
    refused: Mapping[str, str] | None = None,
    gram: str | CountSketch = "auto",
    report: bool = True,
    block: int = COLUMNS,
    **options: Any,
) -> Aggregate:
    """Aggregate the clients' updates by a rule.

    Args:
        updates: (m, d) tensor or array, state dicts, paths of .safetensors or .npy files, or a `Source`.
        sizes: samples n_i of each client.
        rule: name of a rule (`options` are then its options), or a `Rule`.
        granularity: one Gram matrix per "model", "layer" (tensor name up to the last dot) or "tensor".
        weights: "size" for p_i = n_i / n, "uniform" for equal weights.
        tensors: (name, length) of the tensors that make up the columns of a matrix.
        clients: names for messages and the report.
        min_clients: least number of clients with finite updates.
        reference: flat direction (d,) that the server remembers, for rules that rank clients by it (hgd).
        trial: what clients measured of the candidate steps, for the rule `measured`.
        propose: take the average for now and return the candidate steps, for the rule `measured`.
        max_weight: largest share of one client; default: 0.4 under robust rules, else no bound.
        max_update_ratio: refuse updates longer than so many times the median length.
        refused: clients that the caller leaves out, and why; they are reported as rejected.
        gram: "exact", "sketch" (or a `CountSketch`), or "auto": exact unless large (docs/aggregation.md).
        report: False leaves the diagnostics out; the plain average is then one pass over the updates.
        block: most columns of one product; results depend on it by rounding only.
        options: options of a rule that is given by name.

    Returns:
        The aggregate in the form of the updates, and a report: coefficients, step length against the
        average's, votes, rejected clients.

    Raises:
        FedLDError: names, shapes or numbers do not fit, or too few updates are finite.

    >>> result = aggregate(torch.eye(2), [1, 3], "mean")
    >>> result.update, result.report.coefficients
    (tensor([0.2500, 0.7500]), {'model': [0.25, 0.75]})
    """
    rule = as_rule(rule, options)
    names = as_names(updates, clients)
    source = as_source(updates, tensors, names)
    p = as_weights(sizes, weights, names)
    check_reference(source, reference)
    check_block(block)
    check_bounds(max_weight, max_update_ratio)
    checked = Updates(
        source=source,
        clients=names,
        p=p,
        granularity=granularity,
        reference=reference,
        sketch=as_sketch(gram, len(names), sum(spec.size for spec in source.specs), granularity),
        block=block,
    )
    result = combine_updates(
        checked,
        rule,
        trial=trial,
        propose=propose,
        bounds=Bounds(max_weight, max_update_ratio, min_clients),
        refused=refused or {},
        report=report,
    )
    return replace(result, update=source.wrap(result.update))


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Checked updates and the clients that they come from.

    Attributes:
        source: the updates.
        clients: the clients' names, each given once.
        p: the clients' weights, which add up to one.
        granularity: one Gram matrix per "model", "layer" or "tensor".
        reference: flat direction (d,) that the server remembers.
        sketch: what Gram matrices are computed from; None for exact ones.
        block: most columns of one product.
    """

    source: Source
    clients: Sequence[str]
    p: Array
    granularity: str = "model"
    reference: torch.Tensor | None = None
    sketch: CountSketch | None = None
    block: int = COLUMNS


@dataclass(frozen=True)
class Bounds:
    """Largest share of one client, largest length over the median length, least number of clients."""

    max_weight: float | None = None
    max_update_ratio: float | None = None
    min_clients: int = 1


NO_BOUNDS = Bounds()
NONE_REFUSED: Mapping[str, str] = MappingProxyType({})


@torch.no_grad()
def combine_updates(
    updates: Updates,
    rule: Rule,
    *,
    trial: Trial | None = None,
    propose: bool = False,
    bounds: Bounds = NO_BOUNDS,
    refused: Mapping[str, str] = NONE_REFUSED,
    report: bool = True,
) -> Aggregate:
    """Combine updates by a rule: what `aggregate` does after it has checked its inputs.

    Args:
        updates: the updates and their clients.
        rule: the rule.
        trial: what clients measured of the candidate steps.
        propose: take the average for now and return the candidate steps.
        bounds: what bounds weights, lengths and the number of clients.
        refused: clients that the caller leaves out, and why.
        report: False leaves the diagnostics out.

    Returns:
        The aggregate, its update flat, and a report.

    Raises:
        FedLDError: too few updates are finite, or the aggregate is too large.
    """
    if not report and rule.name == "mean" and bounds == NO_BOUNDS and not refused:
        update, finite = _plain_mean(updates)
        if finite:  # else a client may have to be left out
            return Aggregate(update, None, rule)
    problem = _pose(updates, rule, bounds, refused)
    step = _step(rule, problem, trial, propose)
    diagnostics = _diagnostics(rule, problem, step) if report else None
    return Aggregate(step.update, diagnostics, rule, step.candidates)


def _plain_mean(updates: Updates) -> tuple[torch.Tensor, bool]:
    """Give the weighted mean in one pass, and whether it is finite."""
    source, p = updates.source, updates.p
    return combine(source, p[None], (0,) * len(source.specs), range(len(p)))


def _pose(updates: Updates, rule: Rule, bounds: Bounds, refused: Mapping[str, str]) -> "Problem":
    """Compute Gram matrices, and leave out clients that cannot take part."""
    source, names, sketch = updates.source, updates.clients, updates.sketch
    groups, titles = as_groups(tuple(source.specs), updates.granularity)
    grams = exact_gram(source, groups, updates.block) if sketch is None else sketched_gram(source, sketch)
    keep, rejected = screen(
        grams.K, names, refused=refused, max_ratio=bounds.max_update_ratio, least=bounds.min_clients
    )
    claimed = updates.p[keep] / updates.p[keep].sum()
    kept = tuple(names[i] for i in keep)
    dots: Sequence[Array | None] = [None] * len(titles)
    if updates.reference is not None:
        dots = list(inner(source, updates.reference, groups, updates.block)[:, keep])
    # Float32 products carry noise that must not pass for an axis or a conflict.
    precision = 1e-10 if source.dtype == torch.float64 else 1e-6
    return Problem(
        source=source,
        groups=groups,
        block=updates.block,
        keep=keep,
        names=kept,
        claimed=claimed,
        p=capped(claimed, rule.max_weight if bounds.max_weight is None else bounds.max_weight),
        grams=grams.only(keep),
        sketch=sketch,
        precision=precision,
        extras=[Extras(title, precision, dot, kept) for title, dot in zip(titles, dots, strict=True)],
        rejected=rejected,
    )


def _diagnostics(rule: Rule, problem: "Problem", step: "Step") -> Report:
    """Give what the rule did, in numbers that follow from the Gram matrices."""
    grams, names, sketch = problem.grams, list(problem.names), problem.sketch
    K, p, claimed = grams.K.sum(axis=0), problem.p, problem.claimed
    titles = [extra.group for extra in problem.extras]
    return make_report(
        rule,
        K,
        p=p,
        aligned=step.alignment_to_mean,
        precision=problem.precision,
        clients=names,
        rejected=problem.rejected,
        capped={names[i]: float(claimed[i]) for i in np.flatnonzero(claimed > p)},
        outliers=outliers(K, names),
        coefficients={title: row.tolist() for title, row in zip(titles, step.c, strict=False)},
        trial=step.trial,
        sketch=None
        if sketch is None
        else sketch_error(sketch, grams.K, c=step.c, halves=grams.halves, coefficients=step.halves),
    )


def location_of(rule: Rule, values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Compute statistics (m, b) beside the parameters as one row: the mean, under a robust rule the median.

    A client may send a harmless update with harmful statistics, so what a rule makes of updates says nothing
    of them.
    """
    if not rule.robust:
        return weighted_mean(values, p)
    return weighted_median(values, torch.from_numpy(capped(p.double().numpy(), rule.max_weight)))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a rule is applied to: the updates, the clients that take part, their weights and Gram matrices.

    `claimed` are the weights before they were bounded, `rejected` the clients that do not take part.
    """

    source: Source
    groups: tuple[int, ...]
    block: int
    keep: Sequence[int]
    names: tuple[str, ...]
    claimed: Array
    p: Array
    grams: Grams
    sketch: CountSketch | None
    precision: float
    extras: Sequence[Extras]
    rejected: dict[str, str]

    def coefficients(self, rule: GramRule, K: Array) -> Array:
        """Compute c of every group."""
        return np.stack([rule(k, self.p, extra) for k, extra in zip(K, self.extras, strict=True)])

    def combine(self, c: Array) -> torch.Tensor:
        """Compute G c."""
        update, finite = combine(self.source, c, self.groups, self.keep)
        if not finite and not bool(update.isfinite().all()):
            raise FedLDError(
                f"the aggregate is too large for {update.dtype}: pass the updates in a wider type"
            )
        return update


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rule made of it; `halves` are the coefficients that the halves of a sketch would give."""

    update: torch.Tensor
    alignment_to_mean: Alignment
    c: Array
    halves: list[Array]
    trial: Trial | None = None
    candidates: Candidates | None = None


def _step(rule: Rule, problem: Problem, trial: Trial | None, propose: bool) -> Step:
    """Give the rule's aggregate."""
    K, halves = problem.grams.K, problem.grams.halves
    if isinstance(rule, GramRule):
        c = problem.coefficients(rule, K)
        others = [problem.coefficients(rule, half) for half in halves]
        return Step(update=problem.combine(c), alignment_to_mean=alignment(K, c), c=c, halves=others)
    if bases := rule.bases():
        if trial is None and not propose:
            raise FedLDError(f"the rule '{rule.name}' asks clients: use it in an experiment")
        index, length = rule.pairs()[0 if trial is None else trial.chosen]
        indices = range(len(bases)) if trial is None else [index]
        directions = {k: problem.coefficients(bases[k], K) for k in indices}
        basis = {k: problem.combine(c) for k, c in directions.items()}
        proposed = rule.propose(torch.stack([*basis.values()])) if trial is None else None
        c = length * directions[index]
        others = [length * problem.coefficients(bases[index], half) for half in halves]
        return Step(
            update=length * basis[index],
            alignment_to_mean=alignment(K, c),
            c=c,
            halves=others,
            trial=trial,
            candidates=proposed,
        )
    assert isinstance(rule, CoordinateRule)
    update, alignment_to_mean = coordinates(
        problem.source, rule, p=problem.p, keep=problem.keep, columns=problem.block
    )
    return Step(
        update=update, alignment_to_mean=alignment_to_mean, c=np.empty((0, len(problem.p))), halves=[]
    )


PRECISION = 1e-6
"""Of inner products of float32 updates, as in `aggregate`."""


@dataclass(frozen=True, kw_only=True)
class HiddenUpdates:
    """A rule, and clients with updates that it combines without seeing them.

    Args:
        rule: A rule of inner products.
        clients: Names, in the order of the Gram matrix.
        max_weight: Largest share of the weights for one client, instead of the rule's own.

    >>> from fedld.aggregation import Mean
    >>> hidden = HiddenUpdates(rule=Mean(), clients=("a", "b"))
    >>> hidden.coefficients(np.eye(2), np.array([0.25, 0.75]))
    array([0.25, 0.75])
    """

    rule: GramRule
    clients: tuple[str, ...]
    max_weight: float | None = None

    def coefficients(self, K: Array, p: Array) -> Array:
        """Compute c of the aggregate G c.

        Args:
            K: Gram matrix of the updates or of their sketches.
            p: The clients' shares, which add up to one.

        Returns:
            One number per client; some may be negative.
        """
        return self.rule(K, self._capped(p), Extras("model", PRECISION, None, self.clients))

    def aggregate(self, update: torch.Tensor, K: Array, p: Array, sketch: CountSketch) -> Aggregate:
        """Put the sum G c together with what the Gram matrix tells of it.

        Args:
            update: G c.
            K: Gram matrix of the sketches.
            p: The clients' shares.
            sketch: What the updates were sketched by.

        Returns:
            The aggregate; lengths and angles in its report are those of sketches.
        """
        c = self.coefficients(K, p)
        bounded = self._capped(p)
        names = list(self.clients)
        report = make_report(
            self.rule,
            K,
            p=bounded,
            aligned=alignment(K[None], c[None]),
            precision=PRECISION,
            clients=names,
            rejected={},
            capped={names[i]: float(p[i]) for i in np.flatnonzero(p > bounded)},
            outliers=outliers(K, names),
            coefficients={"model": c.tolist()},
            sketch=_expected_error(sketch, K),
        )
        return Aggregate(update, report, self.rule)

    def _capped(self, p: Array) -> Array:
        return capped(p, self.rule.max_weight if self.max_weight is None else self.max_weight)


def _expected_error(sketch: CountSketch, K: Array) -> SketchError:
    """Give the standard deviation of sketched inner products, from the lengths and angles themselves."""
    lengths = np.sqrt(np.diagonal(K))
    scale = np.outer(lengths, lengths)
    cosines = np.divide(K, scale, out=np.zeros_like(K), where=scale > 0)
    return SketchError(
        sketch.buckets, sketch.seed, float(np.sqrt(np.mean((1 + cosines**2) / sketch.buckets)))
    )
