"""`aggregate`: updates in, one update and a report out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedld.aggregation.blocks import COLUMNS
from fedld.aggregation.coordinate import capped, weighted_mean, weighted_median
from fedld.aggregation.gram import Grams, combine, coordinates, inner, sketched_gram
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
)
from fedld.aggregation.measured import Candidates, Trial
from fedld.aggregation.report import Alignment, Report, alignment, make_report, sketch_error
from fedld.aggregation.rule import Array, CoordinateRule, Extras, GramRule, Rule
from fedld.aggregation.screen import outliers, screen
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
        """(m, b) numbers that the same clients sent beside their updates, as one row: see `location_of`."""
        return location_of(self.rule, values, torch.tensor(self.report.weights, dtype=torch.float64))

    def scaled(self, factor: float) -> "Aggregate":
        """A step that is `factor` times as long, and says so."""
        return replace(self, update=factor * self.update, diagnostics=self.report.scaled(factor))

    def without(self, refused: Mapping[str, str]) -> "Aggregate":
        """The same aggregate; its report also names clients that were refused before it was computed."""
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
    groups, titles = as_groups(source, granularity)
    check_reference(source, reference)
    check_block(block)
    check_bounds(max_weight, max_update_ratio)
    sketch = as_sketch(gram, source, granularity)
    plain = rule.name == "mean" and max_weight is None and max_update_ratio is None and not refused
    if plain and not report:
        update, finite = combine(source, np.tile(p, (len(titles), 1)), groups, range(len(p)))
        if finite:  # else somebody may have to be left out
            return Aggregate(source.wrap(update), None, rule)
    grams = exact_gram(source, groups, block) if sketch is None else sketched_gram(source, sketch)
    keep, rejected = screen(grams.K, names, refused or {}, max_update_ratio, min_clients)
    grams, claimed = grams.only(keep), p[keep] / p[keep].sum()
    p = capped(claimed, rule.max_weight if max_weight is None else max_weight)
    kept = [names[i] for i in keep]
    # Float32 products carry noise that must not pass for an axis or a conflict.
    precision = 1e-10 if source.dtype == torch.float64 else 1e-6
    dots = [None] * len(titles) if reference is None else inner(source, reference, groups, block)[:, keep]
    extras = [Extras(title, precision, dot, tuple(kept)) for title, dot in zip(titles, dots, strict=True)]
    step = _step(rule, Problem(source, groups, block, keep, kept, p, grams, extras), trial, propose)
    if not report:
        return Aggregate(source.wrap(step.update), None, rule, step.candidates)
    diagnostics = make_report(
        rule,
        grams.K.sum(axis=0),
        p,
        step.alignment_to_mean,
        precision,
        clients=kept,
        rejected=rejected,
        capped={kept[i]: float(claimed[i]) for i in np.flatnonzero(claimed > p)},
        outliers=outliers(grams.K.sum(axis=0), kept),
        coefficients={title: row.tolist() for title, row in zip(titles, step.c, strict=False)},
        trial=step.trial,
        sketch=None if sketch is None else sketch_error(sketch, grams.K, step.c, grams.halves, step.halves),
    )
    return Aggregate(source.wrap(step.update), diagnostics, rule, step.candidates)


def location_of(rule: Rule, values: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Statistics (m, b) beside the parameters as one row: the mean, under a robust rule the median.

    A client may send a harmless update with harmful statistics, so what a rule makes of updates says nothing
    of them.
    """
    if not rule.robust:
        return weighted_mean(values, p)
    return weighted_median(values, torch.from_numpy(capped(p.double().numpy(), rule.max_weight)))


@dataclass(frozen=True)
class Problem:
    """What a rule is applied to: the updates, the clients that take part, their weights and Gram matrices."""

    source: Source
    groups: Sequence[int]
    block: int
    keep: Sequence[int]
    names: Sequence[str]
    p: Array
    grams: Grams
    extras: Sequence[Extras]

    def coefficients(self, rule: GramRule, K: Array) -> Array:
        """c of every group."""
        return np.stack([rule(k, self.p, extra) for k, extra in zip(K, self.extras, strict=True)])

    def combine(self, c: Array) -> torch.Tensor:
        """G c."""
        update, finite = combine(self.source, c, self.groups, self.keep)
        if not finite and not bool(update.isfinite().all()):
            raise FedLDError(
                f"the aggregate is too large for {update.dtype}: pass the updates in a wider type"
            )
        return update


@dataclass(frozen=True)
class Step:
    """What a rule made of it; `halves` are the coefficients that the halves of a sketch would give."""

    update: torch.Tensor
    alignment_to_mean: Alignment
    c: Array
    halves: list[Array]
    trial: Trial | None = None
    candidates: Candidates | None = None


def _step(rule: Rule, problem: Problem, trial: Trial | None, propose: bool) -> Step:
    """The rule's aggregate."""
    K, halves = problem.grams.K, problem.grams.halves
    if isinstance(rule, GramRule):
        c = problem.coefficients(rule, K)
        others = [problem.coefficients(rule, half) for half in halves]
        return Step(problem.combine(c), alignment(K, c), c, others)
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
        return Step(length * basis[index], alignment(K, c), c, others, trial, proposed)
    assert isinstance(rule, CoordinateRule)
    update, alignment_to_mean = coordinates(problem.source, rule, problem.p, problem.keep, problem.block)
    return Step(update, alignment_to_mean, np.empty((0, len(problem.p))), [])
