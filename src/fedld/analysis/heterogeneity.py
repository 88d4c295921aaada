"""How different the clients' data are: labels, sizes, features. Known before any training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # loads scipy.special on first use: a third of a second
from numpy.typing import ArrayLike, NDArray

from fedld.errors import FedLDError

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LabelMeasures:
    """Differences of label distributions and sizes; a client without data has nan rows.

    `skew` is the root mean square Jensen-Shannon distance between clients beyond what samples of these sizes
    from one distribution show by chance; `p_value` (G test) is how likely chance alone shows as much.
    """

    jensen_shannon: Floats  # (m, m) distances, 0 same .. 1 disjoint
    hellinger: Floats  # (m, m) distances, 0 same .. 1 disjoint
    effective_classes: Floats  # (m,) exp(entropy): 1 = one class, C = balanced
    skew: float
    p_value: float
    size_imbalance: float  # standard deviation / mean of the sizes
    effective_clients: float  # 1 / sum p_i^2


def label_measures(counts: ArrayLike) -> LabelMeasures:
    """Compute measures of a (clients, classes) matrix of label counts.

    >>> measures = label_measures([[50, 0], [0, 50]])
    >>> measures.jensen_shannon[0, 1], measures.hellinger[0, 1], measures.effective_classes.tolist()
    (np.float64(1.0), np.float64(1.0), [1.0, 1.0])
    """
    N = np.asarray(counts, dtype=np.float64)
    if N.ndim != 2 or not np.isfinite(N).all() or N.min(initial=0) < 0 or not N.sum() > 0:
        raise FedLDError(f"label counts must be a (clients, classes) matrix of counts, got shape {N.shape}")
    sizes = N.sum(axis=1)
    P = np.divide(N, sizes[:, None], out=np.full_like(N, np.nan), where=sizes[:, None] > 0)
    entropy = scipy.special.entr(P).sum(axis=1)
    mixed = scipy.special.entr((P[:, None] + P[None]) / 2).sum(axis=2)
    divergence = np.maximum(mixed - (entropy[:, None] + entropy[None]) / 2, 0) / np.log(2)
    classes = ((N[:, None] + N[None]) > 0).sum(axis=2)
    overlap = np.minimum(np.sqrt(P[:, None] * P[None]).sum(axis=2), 1)
    return LabelMeasures(
        jensen_shannon=np.sqrt(divergence),
        hellinger=np.sqrt(1 - overlap),
        effective_classes=np.exp(entropy),
        skew=_beyond_chance(divergence, (classes - 1) / (8 * np.log(2)), sizes),
        p_value=_g_test(N),
        size_imbalance=float(sizes.std() / sizes.mean()),
        effective_clients=float(sizes.sum() ** 2 / (sizes**2).sum()),
    )


def image_features(
    images: NDArray[np.uint8], labels: ArrayLike, clients: Sequence[NDArray[np.int64]], most: int = 300
) -> tuple[Floats, Floats]:
    """Compute mean features and spreads of every client's images, without a network.

    A feature is the mean or the spread of a colour channel, in standard deviations over all images, after the
    mean of its class is subtracted, so that clients with other labels do not count as other cameras. Of a
    table the features are its columns.
    """
    chosen = [part[np.linspace(0, len(part) - 1, min(most, len(part))).astype(int)] for part in clients]
    owner = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
    index = np.concatenate(chosen)
    pixels, y = images[index].astype(np.float32), np.asarray(labels)[index]
    if images.ndim == 4:
        colours = np.concatenate([pixels.mean(axis=(1, 2)), pixels.std(axis=(1, 2))], axis=1)
        features = colours.astype(np.float64)
    else:
        features = _columns(pixels.reshape(len(pixels), -1).astype(np.float64))
    for label in np.unique(y):
        features[y == label] -= features[y == label].mean(axis=0)
    features /= np.maximum(features.std(axis=0), 1e-9)
    parts = [features[owner == i] for i in range(len(chosen))]
    means = [p.mean(axis=0) if len(p) else np.full(features.shape[1], np.nan) for p in parts]
    spreads = [float(np.sqrt(p.var(axis=0).sum())) if len(p) else np.nan for p in parts]
    return np.array(means), np.array(spreads)


def _columns(values: Floats) -> Floats:
    """Select the columns of a table, missing numbers replaced by the mean of the others."""
    present = np.isfinite(values)
    means = np.where(present, values, 0).sum(0) / np.maximum(present.sum(0), 1)
    return np.where(present, values, means)


def feature_distances(means: ArrayLike, spreads: ArrayLike) -> Floats:
    """Compute (m, m) distances between clients' mean features (m, F), in units of the spread inside clients.

    spreads[i] is the root mean square distance of client i's samples from its own mean.
    """
    mu, s = np.asarray(means, dtype=np.float64), np.asarray(spreads, dtype=np.float64)
    if mu.ndim != 2 or s.shape != mu.shape[:1]:
        raise FedLDError(
            f"mean features must be (clients, F) and spreads (clients,), got {mu.shape}, {s.shape}"
        )
    unit = float(np.sqrt(np.nanmean(s**2))) or 1.0
    return np.asarray(np.linalg.norm(mu[:, None] - mu[None], axis=2) / unit)


def feature_shift(distances: Floats, sizes: ArrayLike) -> float:
    """Compute the root mean square of `feature_distances` beyond what finite samples show by chance."""
    return _beyond_chance(distances**2, np.ones_like(distances), np.asarray(sizes, dtype=np.float64))


def _beyond_chance(squares: Floats, chance: Floats, sizes: Floats) -> float:
    """Take the root of the mean over pairs, weighted n_i n_j, of squares minus chance * (1/n_i + 1/n_j)."""
    first, second = np.triu_indices(len(sizes), 1)
    keep = (sizes[first] > 0) & (sizes[second] > 0)
    first, second = first[keep], second[keep]
    if not len(first):
        return 0.0
    expected = chance[first, second] * (1 / sizes[first] + 1 / sizes[second])
    excess = np.average(squares[first, second] - expected, weights=sizes[first] * sizes[second])
    return float(np.sqrt(max(excess, 0.0)))


def _g_test(N: Floats) -> float:
    """Compute the p value that all clients draw from one distribution: G = 2 sum N log(N / expected)."""
    N = N[N.sum(axis=1) > 0][:, N.sum(axis=0) > 0]
    freedom = (N.shape[0] - 1) * (N.shape[1] - 1)
    expected = np.outer(N.sum(axis=1), N.sum(axis=0)) / N.sum()
    G = 2 * float(np.sum(N * np.log(np.where(N > 0, N, 1) / np.where(N > 0, expected, 1))))
    return float(scipy.special.chdtrc(freedom, max(G, 0.0))) if freedom else 1.0
