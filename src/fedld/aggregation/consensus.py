"""`consensus`: the average with less of what the clients disagree on. Derived in docs/aggregation.md."""

from dataclasses import dataclass

import numpy as np

from fedld.aggregation.rule import NO_EXTRAS, Array, Extras, GramRule, check_number, register


@register("consensus")
@dataclass(frozen=True)
class Consensus(GramRule):
    """Stay close to the average g while the clients' gains <v, g_i> spread little, at the average's length.

    v = argmin |v - g|^2 + strength / |g|^2 sum p_i <v, g_i - g>^2 = (I + strength Sigma / |g|^2)^-1 g with
    the disagreement Sigma = sum p_i (g_i - g)(g_i - g)'. Of every direction at least the share `floor` stays:
    w = floor g + (1 - floor) v. The aggregate is u = w |g| / |w|.

    Continuous; |u| = |g|; cos(u, g) >= 2 sqrt(floor) / (1 + floor); u = g for identical clients; the spread
    of the gains relative to their mean is never larger than under the average. Strength 0 is that average.
    """

    strength: float = 1.0
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_number(self, "strength", 0)
        check_number(self, "floor", 0, 1, open_low=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """With H = G J P^1/2 (centred, weighted updates; Sigma = HH'): v = g - H (tau I + H'H)^-1 H'g."""
        rounding = extras.precision * float(p @ np.diagonal(K))
        if self.strength == 0 or rounding == 0:
            return p.copy()
        square = max(float(p @ K @ p), 0.0)
        centre = (np.eye(len(p)) - p[:, None]) * np.sqrt(p)
        tau = (square + rounding) / self.strength
        y = np.linalg.solve(tau * np.eye(len(p)) + centre.T @ K @ centre, centre.T @ (K @ p))
        c = p - (1 - self.floor) * centre @ y
        # Rounding of K must not pass for a short w: where the average drowns in it, the gain goes to 1.
        gain = np.sqrt((square + rounding) / (max(float(c @ K @ c), self.floor**2 * square) + rounding))
        return np.asarray(c * gain)
