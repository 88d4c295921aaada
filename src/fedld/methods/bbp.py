"""BBP-MAP matching of neurons (Yurochkin et al. 2019): which neurons of the clients are one and the same.

A client's neuron is a Gaussian (deviation sigma) around a global neuron, a global neuron a Gaussian (sigma0)
around 0, and how many clients share one follows a Beta-Bernoulli process of mass gamma.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Matching:
    """Global neurons as sums of the clients' neurons assigned to them; `assignment[j][l]` is one of them.

    `width` bounds the number of global neurons; None lets new ones appear.
    """

    neurons: Sequence[Array]
    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0
    width: int | None = None
    assignment: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums: Array = np.zeros((0, self.neurons[0].shape[1]))
        self.counts: Array = np.zeros(0)

    @property
    def means(self) -> Array:
        """Posterior means of the global neurons."""
        return np.asarray(self.sums / self.sigma**2 / self._precision(self.counts)[:, None])

    def _precision(self, counts: Array | float) -> Array:
        return np.asarray(1 / self.sigma0**2 + counts / self.sigma**2)

    def gains(self, j: int) -> Array:
        """Gain in log posterior of giving neuron l of client j to global neuron i, old or new."""
        w, s, J = self.neurons[j] / self.sigma**2, self.sums / self.sigma**2, len(self.neurons)
        squares = (w**2).sum(1)[:, None] + 2 * w @ s.T + (s**2).sum(1)
        old = squares / self._precision(self.counts + 1) - (s**2).sum(1) / self._precision(self.counts)
        old += np.log(self.counts / (J - self.counts))
        room = len(w) if self.width is None else min(len(w), self.width - len(s))
        new = (w**2).sum(1)[:, None] / self._precision(1.0) + 2 * np.log(self.gamma / J)
        return np.hstack([old, new - 2 * np.log(np.arange(1, room + 1))])

    def add(self, j: int) -> None:
        """Assign all neurons of client j at once (Hungarian)."""
        client_neurons = self.neurons[j]
        chosen = (
            scipy.optimize.linear_sum_assignment(-self.gains(j))[1]
            if len(self.sums)
            else np.arange(len(client_neurons))
        )
        fresh = np.sort(chosen[chosen >= len(self.sums)])
        places = np.where(chosen < len(self.sums), chosen, len(self.sums) + np.searchsorted(fresh, chosen))
        self.sums = np.vstack([self.sums, np.zeros((len(fresh), client_neurons.shape[1]))])
        self.counts = np.append(self.counts, np.zeros(len(fresh)))
        self.sums[places] += client_neurons
        self.counts[places] += 1
        self.assignment[j] = places

    def remove(self, j: int) -> None:
        """Take client j out; global neurons that were only its own disappear."""
        places = self.assignment.pop(j)
        self.sums[places] -= self.neurons[j]
        self.counts[places] -= 1
        keep = self.counts > 0
        self.sums, self.counts = self.sums[keep], self.counts[keep]
        renumbered = np.cumsum(keep) - 1
        self.assignment = {k: renumbered[old] for k, old in self.assignment.items()}

    def run(self, sweeps: Iterable[Sequence[int]]) -> "Matching":
        """Everybody once, the largest first; then each sweep takes every client out and matches it anew."""
        for j in sorted(range(len(self.neurons)), key=lambda j: -len(self.neurons[j])):
            self.add(j)
        for sweep in sweeps:
            for j in sweep:
                self.remove(j)
                self.add(j)
        return self
