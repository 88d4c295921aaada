"""The principal axes of the clients' updates, seen from their Gram matrix (Eq. 4-6)."""

from dataclasses import dataclass

import numpy as np

from fedld.aggregation.rule import Array

NO_VOTE = 1e-6  # |<g_i, u_l>| up to this fraction of |g_i| is rounding, not an opinion


@dataclass(frozen=True)
class Spectrum:
    """Axes u_l = G e_l / sqrt(lambda_l), largest eigenvalue first; null axes are left out.

    `values` holds all m eigenvalues (clipped at 0), `vectors` only the e_l of the axes that exist.
    """

    values: Array
    vectors: Array
    norms: Array

    @property
    def rank(self) -> int:
        """Number of axes that exist."""
        return int(self.vectors.shape[1])

    def projections(self, axes: int) -> Array:
        """(m, axes) inner products <g_i, u_l> = sqrt(lambda_l) e_l[i]."""
        return np.asarray(self.vectors[:, :axes] * np.sqrt(self.values[:axes]))

    def votes(self, axes: int) -> Array:
        """(m, axes) signs of the inner products, 0 where a client has no opinion on an axis."""
        dots = self.projections(axes)
        return np.sign(dots) * (np.abs(dots) > NO_VOTE * self.norms[:, None])

    def orientation(self, axes: int) -> Array:
        """Signs that turn each axis towards the mean update (Eq. 6): <u_l, mean g> has that of sum e_l."""
        sums = self.vectors[:, :axes].sum(axis=0)
        return np.where(np.abs(sums) > NO_VOTE, np.sign(sums), 0.0)


def spectrum(K: Array, precision: float = 1e-10) -> Spectrum:
    """Eigen-decomposition of K; axes with lambda_l <= precision * lambda_1 do not exist (covers m > d)."""
    values, vectors = np.linalg.eigh(K)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    rank = int(np.sum(values > precision * values[0])) if values[0] > 0 else 0
    return Spectrum(values, vectors[:, :rank], np.sqrt(np.diagonal(K)))
