"""Count sketches: long vectors as short ones that keep inner products, on average exactly.

Every coordinate is multiplied by a random sign and added to one of k buckets (Charikar et al. 2002). Then
E <Sx, Sy> = <x, y> and Var <Sx, Sy> <= (|x|^2 |y|^2 + <x, y>^2) / k. The sketch is linear, so that the sketch
of a sum is the sum of sketches, and it follows from (seed, k) and the coordinate's number alone: whoever
knows these computes the same one, from a whole vector or from parts of it in any order.

Of k consecutive coordinates every bucket gets one: they are shifted around by a random amount, which makes
the sum a few additions of whole rows, and two coordinates still meet with a probability of at most 1 / k.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedld.seeds import derive

ROWS = 1 << 20  # numbers of a sketch that are added to at once: they stay in the cache, and calls cost little
TURNS = 16  # random numbers are drawn for so many times k coordinates at once


@dataclass(frozen=True)
class CountSketch:
    """Sketch to `buckets` numbers (a multiple of 64)."""

    buckets: int
    seed: int = 0

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Compute (m, buckets) sketches of the rows of (m, d) vectors.

        >>> CountSketch(64)(torch.eye(3)).abs().sum(dim=1)
        tensor([1., 1., 1.])
        """
        sketch = torch.zeros(len(vectors), self.buckets, dtype=vectors.dtype, device=vectors.device)
        self.add(sketch, vectors, 0)
        return sketch

    def add(self, sketch: torch.Tensor, columns: torch.Tensor, start: int) -> None:
        """Add columns start, start + 1, ... of the vectors to their sketch.

        A sign changes no digit, so the products are exact and the layout of the columns does not show.
        """
        rows = max(1, ROWS // self.buckets)
        for part, updates in zip(torch.split(sketch, rows), torch.split(columns, rows), strict=True):
            self._add(part, updates, start)

    def _add(self, sketch: torch.Tensor, columns: torch.Tensor, start: int) -> None:
        k, at, end = self.buckets, 0, columns.shape[1]
        while at < end:
            turn, offset = divmod(start + at, k)
            shifts, signs = _turns(k, self.seed, turn // TURNS, sketch.dtype)
            bucket = (offset + shifts[turn % TURNS]) % k
            n = min(k - offset, k - bucket, end - at)
            sign = signs[turn % TURNS, offset : offset + n]
            sketch[:, bucket : bucket + n].addcmul_(columns[:, at : at + n].to(sketch.dtype), sign)
            at += n


@lru_cache(maxsize=16)
def _turns(k: int, seed: int, part: int, dtype: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """Draw shifts and signs of TURNS times k coordinates."""
    random = np.random.Philox(key=derive(seed, "sketch", k), counter=[0, part, 0, 0])
    shifts = (random.random_raw(TURNS) % np.uint64(k)).tolist()
    bits = np.unpackbits(random.random_raw(TURNS * k // 64).astype("<u8").view(np.uint8))
    return shifts, torch.from_numpy(bits).view(TURNS, k).to(dtype).mul_(2).sub_(1)
