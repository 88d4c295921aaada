"""`consensus`: the average with less of what the clients disagree on. Derived in docs/aggregation.md."""

from dataclasses import dataclass

import numpy as np

from fedld.aggregation.rule import NO_EXTRAS, Array, Extras, GramRule, check_number, register


@register("consensus")
@dataclass(frozen=True)
class Consensus(GramRule):
    """Stay close to the average g while the clients' gains <u, g_i> spread little, at the average's length.

    v = argmin |v - g|^2 + strength / |g|^2 sum p_i <v, g_i - g>^2 = (I + strength Sigma / |g|^2)^-1 g, and
    u = v |g| / |v|, where Sigma = sum p_i (g_i - g)(g_i - g)' holds the disagreement. `strength` 0 is the
    plain average; the limit of large strength is the direction in which every client gains the same.

    Continuous, |u| = |g|, <u, g> > 0, u = g for identical clients, and the spread of the gains relative to
    their mean is never larger than under the average.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        check_number(self, "strength", 0)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """With H = G J P^1/2 (centred and weighted updates, Sigma = HH'): v = g - H (tau I + H'H)^-1 H'g."""
        square = float(p @ K @ p)
        if self.strength == 0 or square <= extras.precision * float(p @ np.diagonal(K)):
            return p.copy()  # nothing of the average is above the rounding of K
        centre = (np.eye(len(p)) - p[:, None]) * np.sqrt(p)
        disagreement = centre.T @ K @ centre
        tau = square / self.strength
        y = np.linalg.solve(tau * np.eye(len(p)) + disagreement, centre.T @ (K @ p))
        c = p - centre @ y
        largest = 1 + np.trace(disagreement) / tau  # |g| / |v| is at most this, whatever rounding says
        return np.asarray(c * np.sqrt(square / max(float(c @ K @ c), square / largest**2)))
