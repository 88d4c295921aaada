"""A rule of inner products for updates that the server does not see: it has their Gram matrix alone.

The coefficients c follow from K and p. Somebody else adds up G c, in a secure sum with the weights c_i, and
gives the sum back for the report.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedld.aggregation.coordinate import capped
from fedld.aggregation.core import Aggregate
from fedld.aggregation.report import SketchError, alignment, make_report
from fedld.aggregation.rule import Array, Extras, GramRule
from fedld.aggregation.screen import outliers
from fedld.aggregation.sketch import CountSketch

PRECISION = 1e-6
"""Of inner products of float32 updates, as in `aggregate`."""


@dataclass(frozen=True, kw_only=True)
class HiddenUpdates:
    """A rule and the clients whose updates it combines without seeing one.

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
            bounded,
            alignment(K[None], c[None]),
            PRECISION,
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
