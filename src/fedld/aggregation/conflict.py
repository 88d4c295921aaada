"""Rules that take conflict out of updates: in pairs, by a common descent, along principal axes, by votes.

Vectors are rows a of coefficients, a'Kb their dot product.
"""

import re
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.optimize on first use: half a second that most runs never need
from numpy.typing import NDArray

from fedld.aggregation.rule import NO_EXTRAS, Array, Extras, GramRule, check_number, register, spectrum
from fedld.seeds import numpy_generator


def conflict(across: float, squares: Array, reaches: Array, precision: float) -> Array:
    """Give shares <a,b>/|b|^2 and <a,b>/|a|^2 that conflicting vectors lose to each other, 0 if they agree.

    What is left of nearly opposite updates after a projection may be the rounding of K. It counts for nothing
    below `precision`, relative to the reach sum |a_i| |g_i|, so that no share can blow up.
    """
    if across >= -precision * reaches.prod():
        return np.zeros(2)
    return np.asarray(across / np.maximum(squares, precision * reaches**2)[::-1])


@register("fedgh")
@dataclass(frozen=True)
class GradientHarmonisation(GramRule):
    """Gradient harmonisation (Zhang et al. 2024): conflicting pairs lose their mutual projections.

    What an early pair loses changes what later pairs meet, so the outcome depends on the clients' order: they
    meet in the order of their names, numbers within names by value. With `orders` above 1 the result is
    the mean over so many random orders, drawn from `seed`, and depends on the names little.
    """

    orders: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(self, "orders", 1, whole=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Compute the mean over the orders."""
        names = extras.names or tuple(str(i) for i in range(len(p)))
        order = np.array(sorted(range(len(p)), key=lambda i: natural(names[i])))
        generator = numpy_generator(self.seed, "fedgh", extras.group)
        shuffled = [order] if self.orders == 1 else [generator.permutation(order) for _ in range(self.orders)]
        results = [self._harmonise(K, p, shuffle, extras.precision) for shuffle in shuffled]
        return np.asarray(np.mean(results, axis=0))

    def _harmonise(self, K: Array, p: Array, order: NDArray[np.int64], precision: float) -> Array:
        """Project where t = <a_i, a_j> < 0 for i before j: a_i -= t/|a_j|^2 a_j and a_j -= t/|a_i|^2 a_i."""
        A, KA = np.eye(len(p)), K.copy()  # rows a_i and K a_i, so that an inner product costs O(m)
        r = np.sqrt(np.diagonal(K))
        for place, i in enumerate(order):
            for j in order[place + 1 :]:
                pair = [i, j]
                squares, reaches = np.sum(A[pair] * KA[pair], axis=1), np.abs(A[pair]) @ r
                shares = conflict(float(A[i] @ KA[j]), squares, reaches, precision)[:, None]
                A[pair], KA[pair] = A[pair] - shares * A[[j, i]], KA[pair] - shares * KA[[j, i]]
        return p @ A


def natural(name: str) -> list[tuple[str, int]]:
    """Make a sorting key under which client2 comes before client10.

    >>> sorted(["client10", "client2", "a"], key=natural)
    ['a', 'client2', 'client10']
    """
    return [(text, int(number or -1)) for text, number in re.findall(r"(\D*)(\d*)", name)]


@register("pcgrad")
@dataclass(frozen=True)
class PCGrad(GramRule):
    """Projecting conflicting gradients (Yu et al. 2020): on the others' original updates, in random order."""

    seed: int = 0

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give the average of the projected updates."""
        generator = numpy_generator(self.seed, "pcgrad", extras.group)
        return p @ project(K, np.array([generator.permutation(len(p)) for _ in p]))


def project(K: Array, orders: NDArray[np.int64]) -> Array:
    """Give rows a_i after client i met others in order orders[i]: t = <a_i, g_j> < 0 -> a_i -= t/K_jj e_j."""
    A = np.eye(len(K))
    for i, order in enumerate(orders):
        dots = K[i].copy()
        for j in order:
            if j != i and dots[j] < 0:
                share = dots[j] / K[j, j]
                A[i, j] -= share
                dots -= share * K[j]
    return A


@register("hgd")
@dataclass(frozen=True)
class HGD(GramRule):
    """Hierarchical gradient de-confliction (FedDM): pairs of opposite rank are freed of conflict and summed.

    Clients are ranked by their projection on a reference direction (`reference` of `aggregate`, meant for the
    moving average of past aggregates; else the plain average). First meets last, second meets last but one,
    and so on until one vector is left. `released` repeats two things of the released code: 1e-7 in the
    denominators, and a last pair projected one after the other with a stale inner product, which can blow up
    10^6-fold.
    """

    released: bool = False

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give the tree's root; the weights enter at its leaves."""
        m = len(p)
        reference = K @ p if extras.reference is None else extras.reference
        rows = np.diag(m * p)
        while len(rows) > 1:
            order = np.argsort(-(rows @ reference), kind="stable") if len(rows) > 2 else np.arange(2)
            half = len(rows) // 2
            pairs = [rows[[i, j]] for i, j in zip(order[:half], order[::-1], strict=False)]
            merge = self._released_merge if self.released else self._merge
            merged = [merge(K, pair, extras.precision, last=len(rows) == 2) for pair in pairs]
            rows = np.vstack([*merged, rows[order[half : len(rows) - half]]])
        return np.asarray(rows[0] / m)

    def _merge(self, K: Array, pair: Array, precision: float, *, last: bool) -> Array:
        """Sum of the pair, each without its projection on the other if they conflict; the last like any."""
        dots, reaches = pair @ K @ pair.T, np.abs(pair) @ np.sqrt(np.diagonal(K))
        away, back = conflict(float(dots[0, 1]), np.diagonal(dots), reaches, precision)
        return np.asarray((1 - back) * pair[0] + (1 - away) * pair[1])

    def _released_merge(self, K: Array, pair: Array, precision: float, *, last: bool) -> Array:
        a, b = pair
        across = float(a @ K @ b)
        if across >= 0:
            return np.asarray(a + b)
        projected = a - across / (b @ K @ b + 1e-7) * b
        against = projected if last else a
        return np.asarray(projected + b - across / (against @ K @ against + 1e-7) * against)


@register("min-norm")
@dataclass(frozen=True)
class MinNorm(GramRule):
    """MGDA (Désidéri 2012): the shortest convex combination of the updates, min a'Ka on the simplex."""

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Solve by non-negative least squares: min |Gx|^2 + (1'x - 1)^2 over x >= 0 is s a with the same a.

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
        """Compute c = p + radius |g| / |Gw| w."""
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

        result = scipy.optimize.minimize(
            objective,
            p,
            jac=True,
            method="SLSQP",
            bounds=[(0.0, 1.0)] * len(p),
            constraints=scipy.optimize.LinearConstraint(np.ones((1, len(p))), 1.0, 1.0),
            options={"ftol": 1e-14, "maxiter": 500},
        )
        w = np.maximum(result.x, 0.0)
        return np.asarray(w / w.sum())


@register("pgrad")
@dataclass(frozen=True)
class PrincipalGradient(GramRule):
    """The leading axes of the centred models, turned to the average and summed, at the average's length.

    The authors train on one domain after the other, centre the points of that trajectory (its start
    included), take the leading axes v_l of their scatter, turn each towards the whole displacement, and give
    sum_l lambda_l / |lambda|_2 v_l the displacement's length. Clients train in parallel: the points are the
    start and the clients' models, and the displacement is the average update.
    """

    components: int = 4

    def __post_init__(self) -> None:
        check_number(self, "components", 1, whole=True)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Take X = [0, G], J = I - 11'/(m + 1): JX'XJ e_l = lambda_l e_l, v_l = XJ e_l / sqrt(lambda_l)."""
        points = len(p) + 1
        J = np.eye(points) - 1 / points
        axes = spectrum(J @ np.pad(K, (1, 0)) @ J, extras.precision)
        L = min(self.components, axes.rank)
        values, rows = axes.values[:L], (J @ axes.vectors[:, :L])[1:]
        towards = np.sign(rows.T @ (K @ p))
        c = rows @ (np.sqrt(values) * towards)
        square, length = (max(float(x @ K @ x), 0.0) for x in (c, p))
        return np.asarray(c * np.sqrt(length / square) if square > 0 else p.copy())


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
        """Compute v = g - H (tau I + H'H)^-1 H'g with H = G J P^1/2 (centred, weighted updates)."""
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
