"""The plain average and the paper's principal-gradient rule, both as coefficients of the updates."""

from dataclasses import dataclass

import numpy as np

from fedld.aggregation.rule import (
    NO_EXTRAS,
    Array,
    Extras,
    GramRule,
    Spectrum,
    check_choice,
    check_number,
    register,
    spectrum,
)


@register("mean")
@dataclass(frozen=True)
class Mean(GramRule):
    """FedAvg: c = p."""

    @property
    def sums_suffice(self) -> bool:
        """The mean of the updates is the aggregate."""
        return True

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Give the weights themselves."""
        return p.copy()


@register("principal")
@dataclass(frozen=True)
class Principal(GramRule):
    """Principal-gradient aggregation (Eq. 4-7): every update is rebuilt on the leading axes, then averaged.

    g_i' = |g_i| sum_{l <= L} omega_l s_il u_l, where s_il is client i's vote on axis l, so that
    c = E diag(omega_l / sqrt(lambda_l)) S'(p o r).

    weighting   omega_l = lambda_l / |lambda_1..L|_2 (`l2`, the only one that keeps |g_i'| = |g_i|), over the
                sum of the kept (`l1`) or of all eigenvalues (`sum`, the released code), or 1 (`literal`)
    conflict    `keep` a client's own vote; `drop` votes against the oriented axis; `pgrad` gives every client
                the oriented axis; `smooth` corrects the length once, after the weighted sum (continuous);
                `project` weighs the average's own components and gives the sum the average's length: with
                weighting `literal` the average's projection on the leading axes, the only reading here that
                stands still at an optimum
    components  L as a fraction of the clients (float) or as a count (int)
    energy      chooses L by the share of the eigenvalues' sum that is kept, instead of `components`
    """

    weighting: str = "l2"
    conflict: str = "keep"
    components: float | int = 0.8
    energy: float | None = None

    def __post_init__(self) -> None:
        check_choice(self, "weighting", ("l2", "l1", "sum", "literal"))
        check_choice(self, "conflict", ("keep", "drop", "pgrad", "smooth", "project"))
        if isinstance(self.components, int):
            check_number(self, "components", 1)
        else:
            check_number(self, "components", 0, 1, open_low=True)
        if self.energy is not None:
            check_number(self, "energy", 0, 1, open_low=True)

    def kept(self, axes: Spectrum) -> int:
        """Give the number of leading axes that are used (L of the paper, 0 only if every update is zero)."""
        if self.energy is not None:
            reached = np.cumsum(axes.values) >= self.energy * axes.values.sum() * (1 - 1e-12)
            wanted = int(np.argmax(reached)) + 1
        elif isinstance(self.components, int):
            wanted = self.components
        else:
            wanted = max(1, int(self.components * len(axes.values) + 1e-9))
        return min(wanted, axes.rank)

    def __call__(self, K: Array, p: Array, extras: Extras = NO_EXTRAS) -> Array:
        """Compute c = E diag(omega / sqrt(lambda)) S'(p o r)."""
        axes = spectrum(K, extras.precision)
        L = self.kept(axes)
        E, values, r = axes.vectors[:, :L], axes.values[:L], axes.norms
        omega = self._omega(values, axes.values)
        if self.conflict == "project":
            return self._project(K, p, E @ (omega * (E.T @ p)), extras.precision)
        if self.conflict == "smooth":
            lengths = np.sqrt(np.sum((omega * axes.projections(L)) ** 2, axis=1))
            # Products are rounded before they are added, as BLAS may not do: opposite clients cancel exactly.
            sums: Array = (E * (p * _divide(r, lengths))[:, None]).sum(axis=0)
            return E @ (omega * sums)
        return E @ (omega / np.sqrt(values) * (self._votes(axes, L).T @ (p * r)))

    def _omega(self, kept: Array, every: Array) -> Array:
        if self.weighting == "literal":
            return np.ones_like(kept)
        norm = {"l2": np.linalg.norm(kept), "l1": kept.sum(), "sum": every.sum()}[self.weighting]
        return kept / (norm or 1.0)

    def _project(self, K: Array, p: Array, c: Array, precision: float) -> Array:
        """Compute G c at the length of G p.

        p itself where the average has no part on the axes but rounding.
        """
        square, length = (max(float(x @ K @ x), 0.0) for x in (c, p))
        return c * np.sqrt(length / square) if square > precision * length else p.copy()

    def _votes(self, axes: Spectrum, L: int) -> Array:
        votes, towards = axes.votes(L), axes.orientation(L)
        if self.conflict == "drop":
            return np.where(votes * towards > 0, votes, 0.0)
        if self.conflict == "pgrad":
            return np.broadcast_to(towards, votes.shape)
        return votes


def _divide(a: Array, b: Array) -> Array:
    """Compute a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)
