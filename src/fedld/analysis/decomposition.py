"""The paper's loss decomposition (Eq. 2): local + shift + aggregation = L(w).

cross_loss[j, i] = L_j(w_i): mean plain cross-entropy of the model of sampled client i, as it was before
aggregation, on the data of client j (all clients, sampled or not). docs/decomposition.md explains the terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedld.errors import FedLDError
from fedld.records.schema import CrossLine

Floats = NDArray[np.float64]
TERMS = ("local", "shift", "aggregation", "total")


@dataclass(frozen=True, kw_only=True)
class Decomposition:
    """Signed terms, and the client contributions they are weighted sums of.

    With p_j = n_j / n over all clients and q_i over the sampled ones:

    local_by_model[i]       = M[i, i]                      local       = sum_i q_i local_by_model[i]
    shift_by_model[i]       = sum_j p_j M[j, i] - M[i, i]  shift       = sum_i q_i shift_by_model[i]
    aggregation_by_client[j] = L_j(w) - sum_i q_i M[j, i]  aggregation = sum_j p_j aggregation_by_client[j]

    A contribution of weight 0 (a client without data, or not measured) is nan. `diverged` lists clients
    whose model has a loss that is not finite; the terms it enters are then inf, -inf or nan and `finite` is
    False.
    """

    local: float
    shift: float
    aggregation: float
    total: float
    sampled: tuple[int, ...]
    weights: Floats
    local_by_model: Floats
    shift_by_model: Floats
    aggregation_by_client: Floats
    diverged: tuple[int, ...]
    standard_error: dict[str, float] | None = None

    @property
    def absolute(self) -> dict[str, float]:
        """What the paper plots: the distribution shift loss and the aggregation loss are absolute values."""
        return {term: abs(getattr(self, term)) for term in TERMS}

    @property
    def identity_error(self) -> float:
        """|local + shift + aggregation - total|; nan if a term is not finite."""
        return abs(self.local + self.shift + self.aggregation - self.total)

    @property
    def finite(self) -> bool:
        """Whether all terms are numbers."""
        return all(np.isfinite(getattr(self, term)) for term in TERMS)

    @property
    def worst_shift(self) -> int | None:
        """The client with the largest shift of its model: its loss elsewhere minus its loss at home."""
        index = _argmax(self.shift_by_model)
        return None if index is None else self.sampled[index]

    @property
    def most_hurt(self) -> int | None:
        """The client with the largest aggregation loss: the aggregate on its data against local models."""
        return _argmax(self.aggregation_by_client)

    def to_json(self) -> dict[str, Any]:
        """Give plain numbers for a record; None where not finite."""
        return {
            **{term: _number(getattr(self, term)) for term in TERMS},
            "identity_error": _number(self.identity_error),
            "sampled": list(self.sampled),
            "local_by_model": [_number(x) for x in self.local_by_model],
            "shift_by_model": [_number(x) for x in self.shift_by_model],
            "aggregation_by_client": [_number(x) for x in self.aggregation_by_client],
            "diverged": list(self.diverged),
            "standard_error": self.standard_error,
        }


def decompose(
    cross_loss: ArrayLike,
    global_losses: ArrayLike,
    sizes: ArrayLike,
    sampled: Sequence[int] | None = None,
    *,
    cross_error: ArrayLike | None = None,
    global_error: ArrayLike | None = None,
) -> Decomposition:
    """Decompose L(w) = sum_j p_j L_j(w) into local, shift and aggregation loss (Eq. 2).

    Args:
        cross_loss: (clients, sampled) matrix M[j, i] = L_j(w_i).
        global_losses: (clients,) losses L_j(w) of the aggregate.
        sizes: (clients,) numbers of samples; 0 gives weight 0, and that client's losses may be nan.
        sampled: client of each column; None: every client, in order.
        cross_error: standard errors of `cross_loss`, where it is estimated.
        global_error: standard errors of `global_losses`, where they are estimated.

    Returns:
        The signed terms, which add up to L(w), and every client's contribution.

    Raises:
        FedLDError: shapes do not fit, or sizes are negative.

    >>> d = decompose([[0.2, 1.0], [0.8, 0.4]], [0.5, 0.5], [100, 100])
    >>> round(d.local, 12), round(d.shift, 12), round(d.aggregation, 12), round(d.total, 12)
    (0.3, 0.3, -0.1, 0.5)
    """
    M, L, p, q, index = _checked(cross_loss, global_losses, sizes, sampled)
    home = M[index, np.arange(len(index))]
    with np.errstate(invalid="ignore"):  # inf - inf is nan, which is what a diverged model's term is
        shift_by_model = np.where(q > 0, _weighted(p, M, axis=0) - home, np.nan)
        aggregation_by_client = np.where(p > 0, L - _weighted(q, M.T, axis=0), np.nan)
    local, mixed = _sum(q, home), _sum(q, _weighted(p, M, axis=0))
    total = _sum(p, L)
    return Decomposition(
        local=local,
        shift=mixed - local,
        aggregation=total - mixed,
        total=total,
        sampled=tuple(index.tolist()),
        weights=p,
        local_by_model=np.where(q > 0, home, np.nan),
        shift_by_model=shift_by_model,
        aggregation_by_client=aggregation_by_client,
        diverged=tuple(index[(q > 0) & ~np.isfinite(M[p > 0]).all(axis=0)].tolist()),
        standard_error=_standard_error(cross_error, global_error, p, q, index=index),
    )


def decompose_line(line: CrossLine) -> Decomposition | None:
    """Decompose a line of cross_loss.jsonl over the clients that were measured.

    Clients in the line's `not_measured` get weight 0, and the weights of the others are renormalised. Of a
    method without a global model only the local and the shift term are finite.

    Returns:
        The terms; None if no client that trained was measured.
    """
    sizes = line["sizes"]
    if missing := line.get("not_measured"):
        sizes = [0 if client in missing else n for client, n in zip(line["clients"], sizes, strict=True)]
        if not any(sizes[i] for i in line["sampled"]):
            return None
    losses = line["global_losses"]
    return decompose(
        line["cross_loss"],
        [float("nan")] * len(sizes) if losses is None else losses,
        sizes,
        line["sampled"],
        cross_error=line.get("standard_errors"),
        global_error=line.get("global_errors"),
    )


def _weighted(weights: Floats, values: Floats, axis: int) -> Floats:
    """Add up weighted values, skipping weight 0, where values may be nan."""
    keep = weights > 0
    return np.asarray(np.tensordot(weights[keep], values[keep], axes=(0, axis)))


def _sum(weights: Floats, values: Floats) -> float:
    return float(_weighted(weights, values, axis=0))


def _standard_error(
    cross: ArrayLike | None, whole: ArrayLike | None, p: Floats, q: Floats, index: NDArray[np.int64]
) -> dict[str, float] | None:
    """Bound the terms' standard errors from above.

    All models are evaluated on the same samples of client j, so errors inside a row are correlated in a way
    that single entries do not tell: they add up linearly (the worst case), independent clients in squares.
    """
    if cross is None and whole is None:
        return None
    shape = (len(p), len(q))
    S = np.zeros(shape) if cross is None else np.asarray(cross, dtype=np.float64)
    s = np.zeros(len(p)) if whole is None else np.asarray(whole, dtype=np.float64)
    if S.shape != shape or s.shape != shape[:1]:
        raise FedLDError(f"standard errors must be {shape} and {shape[:1]}, got {S.shape} and {s.shape}")
    mixed, home = np.outer(p, q), np.zeros(shape)
    home[index, np.arange(len(q))] = q
    coefficients = {
        "local": (home, 0 * p),
        "shift": (mixed - home, 0 * p),
        "aggregation": (-mixed, p),
        "total": (0 * mixed, p),
    }
    rows = {
        term: np.where(a != 0, np.abs(a) * S, 0).sum(axis=1) + np.where(b != 0, b * s, 0)
        for term, (a, b) in coefficients.items()
    }
    return {term: float(np.linalg.norm(row)) for term, row in rows.items()}


def _checked(
    cross_loss: ArrayLike, global_losses: ArrayLike, sizes: ArrayLike, sampled: Sequence[int] | None
) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64]]:
    M, L, n = (np.asarray(x, dtype=np.float64) for x in (cross_loss, global_losses, sizes))
    if M.ndim != 2 or not M.size:
        raise FedLDError(f"cross_loss must be a matrix (clients, sampled clients), got shape {M.shape}")
    clients, columns = M.shape
    if L.shape != (clients,) or n.shape != (clients,):
        raise FedLDError(
            f"cross_loss has {clients} clients but global_losses has shape {L.shape} and sizes {n.shape}"
        )
    index = np.arange(clients) if sampled is None else np.asarray(sampled, dtype=np.int64)
    if index.shape != (columns,):
        raise FedLDError(f"cross_loss has {columns} columns for {index.size} sampled clients")
    if len(set(index.tolist())) < columns or index.min() < 0 or index.max() >= clients:
        raise FedLDError(f"sampled clients must be distinct and in 0..{clients - 1}, got {index.tolist()}")
    if not np.isfinite(n).all() or n.min() < 0 or not n[index].sum() > 0:
        raise FedLDError(f"sizes must be at least 0 and positive for a sampled client, got {n.tolist()}")
    return M, L, n / n.sum(), n[index] / n[index].sum(), index


def _argmax(values: Floats) -> int | None:
    return None if np.isnan(values).all() else int(np.nanargmax(values))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
