"""Rules that treat the clients as objectives of one optimisation problem."""

from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.optimize on first use: half a second that most runs never need

from fedld.aggregation.rule import NO_EXTRAS, Array, Extras, GramRule, check_number, register


@register("min-norm")
@dataclass(frozen=True)
class MinNorm(GramRule):
    """MGDA (Désidéri 2012): the shortest convex combination of the updates, min a'Ka on the simplex."""

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Exact by non-negative least squares: min |Gx|^2 + (1'x - 1)^2 over x >= 0 is s a with the same a.

        With x = s a the best s leaves q / (1 + q), q = a'Ka, which grows with q.
        """
        scale = np.trace(K) / len(K)
        if scale == 0:
            return p.copy()
        values, vectors = np.linalg.eigh(K / scale)
        root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
        x, _ = scipy.optimize.nnls(np.vstack([root, np.ones(len(K))]), np.append(np.zeros(len(K)), 1.0))
        return np.asarray(x / x.sum())


@register("cagrad")
@dataclass(frozen=True)
class CAGrad(GramRule):
    """Conflict-averse descent (Liu et al. 2021): the best worst-client gain within `radius` of the average.

    max_u min_i <g_i, u> with |u - g| <= radius |g|. Its dual picks w on the simplex that minimises
    w'Kp + radius |g| |Gw|; then u = g + radius |g| Gw / |Gw|.
    """

    radius: float = 0.5

    def __post_init__(self) -> None:
        check_number(self, "radius", 0)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """c = p + radius |g| / |Gw| w."""
        length = np.sqrt(max(float(p @ K @ p), 0.0))
        if length == 0:
            return p.copy()
        w = self._dual(K / length**2, p)
        shortest = np.sqrt(max(float(w @ K @ w), 0.0))
        return p + (self.radius * length / shortest * w if shortest > 1e-9 * length else 0.0)

    def _dual(self, K: Array, p: Array) -> Array:
        def objective(w: Array) -> tuple[float, Array]:
            Kw = K @ w
            norm = np.sqrt(max(float(w @ Kw), 1e-18))
            return float(p @ Kw + self.radius * norm), K @ p + self.radius * Kw / norm

        found = scipy.optimize.minimize(
            objective,
            p,
            jac=True,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * len(p),
            constraints=scipy.optimize.LinearConstraint(np.ones((1, len(p))), 1.0, 1.0),
            options={"ftol": 1e-14, "maxiter": 500},
        )
        w = np.maximum(found.x, 0.0)
        return np.asarray(w / w.sum())
