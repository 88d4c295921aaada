"""How the columns of the updates are cut: blocks are read at once, pieces are multiplied at once."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from fedld.aggregation.sources import Source

BLOCK = 8 << 20  # bytes of all clients that one thread reads at once: a millisecond's work
PIECE = (
    1 << 20
)  # bytes of one product: they stay in the cache of one core, and a call costs little beside them
COLUMNS = 16384  # of one product, at most: float32 sums of more would lose digits


@dataclass(frozen=True)
class Range:
    """Columns start..stop of one tensor, and their place in the flat update."""

    tensor: int
    start: int
    stop: int
    place: slice


@dataclass(frozen=True)
class ColumnBlock:
    """Ranges of one group, one after the other; `start` counts the group's columns before them."""

    group: int
    start: int
    ranges: tuple[Range, ...]

    @property
    def columns(self) -> int:
        """Number of columns."""
        return sum(part.stop - part.start for part in self.ranges)


def piece_columns(clients: int, block: int = COLUMNS) -> int:
    """Columns of one product: fewer for many clients, so that the piece stays in the cache."""
    return min(block, max(256, PIECE // (4 * clients) // 64 * 64))


def block_columns(clients: int, piece: int) -> int:
    """Columns of one block: a whole number of pieces."""
    return piece * max(1, BLOCK // (4 * clients * piece))


def blocks(source: Source, groups: Sequence[int], width: int) -> list[ColumnBlock]:
    """All columns, by group and tensor name: the same sums whatever order a file stores."""
    sizes = [spec.size for spec in source.specs]
    offsets = [0, *accumulate(sizes)]
    found: list[ColumnBlock] = []
    order = sorted(range(len(sizes)), key=lambda t: (groups[t], source.specs[t].name))
    for group in sorted(set(groups)):
        parts: list[Range] = []
        start = filled = 0
        for tensor in (t for t in order if groups[t] == group):
            at = 0
            while at < sizes[tensor]:
                stop = min(at + width - filled, sizes[tensor])
                parts.append(Range(tensor, at, stop, slice(offsets[tensor] + at, offsets[tensor] + stop)))
                at, filled = stop, filled + stop - at
                if filled == width:
                    found.append(ColumnBlock(group, start, tuple(parts)))
                    parts, start, filled = [], start + width, 0
        if parts:
            found.append(ColumnBlock(group, start, tuple(parts)))
    return found


def read(source: Source, block: ColumnBlock) -> list[torch.Tensor]:
    """The columns of every range, (m, b) each."""
    return [source.read(part.tensor, part.start, part.stop) for part in block.ranges]


def pieces(parts: Sequence[torch.Tensor], width: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """(m, <= width) pieces of the parts side by side, each copied into the same memory in the same layout.

    BLAS and sums round differently by stride and alignment: copies make all sources give the same bits.
    """
    m, left = parts[0].shape[0], sum(part.shape[1] for part in parts)
    memory = scratch("piece", m * min(width, left), dtype, parts[0].device)
    filled = 0
    for part in parts:
        at = 0
        while at < part.shape[1]:
            columns = min(width, left)
            piece = memory[: m * columns].view(m, columns)
            take = min(columns - filled, part.shape[1] - at)
            piece[:, filled : filled + take] = part[:, at : at + take]
            at, filled = at + take, filled + take
            if filled == columns:
                yield piece
                left, filled = left - columns, 0


_memory = threading.local()


def scratch(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of this thread that is used again and again: fresh pages would cost more than the products."""
    bytes_ = size * dtype.itemsize
    found: torch.Tensor | None = getattr(_memory, purpose, None)
    if found is None or found.numel() < bytes_ or found.device != device:
        found = torch.empty(max(bytes_, PIECE), dtype=torch.uint8, device=device)
        setattr(_memory, purpose, found)
    return found[:bytes_].view(dtype)


def scatter(out: torch.Tensor, block: ColumnBlock, columns: torch.Tensor) -> None:
    """Write the block's columns of the aggregate to their places."""
    widths = [part.stop - part.start for part in block.ranges]
    for part, values in zip(block.ranges, torch.split(columns, widths), strict=True):
        out[part.place] = values
