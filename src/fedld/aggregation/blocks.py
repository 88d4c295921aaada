"""How the columns of the updates are cut and shared among threads.

Blocks are read at once, pieces are multiplied at once.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TypeVar

import torch

from fedld.aggregation.sources import TensorSpec

BLOCK = 8 << 20  # bytes of all clients that one thread works on at once: calls cost little beside it
PIECE = 2 << 20  # bytes of one product, at most
COLUMNS = 16384  # of one product, at most: float32 sums of more would lose digits
SUM = 1 << 19  # columns of one sum over clients, at most: a huge page of the aggregate
APART = 16  # columns between rows of a copy: rows a power of two apart would push each other out of the cache


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


def piece_columns(clients: int, block: int = COLUMNS) -> int:
    """Columns of one product: fewer for many clients, so that the piece stays in the cache."""
    return min(block, max(256, PIECE // (4 * clients) // 64 * 64))


@lru_cache(maxsize=16)
def product_blocks(
    specs: tuple[TensorSpec, ...], groups: tuple[int, ...], clients: int, piece: int
) -> tuple[ColumnBlock, ...]:
    """Blocks of a whole number of pieces each; the same in every round of a run."""
    return tuple(blocks(specs, groups, piece * max(1, BLOCK // (4 * clients * piece))))


def blocks(specs: Sequence[TensorSpec], groups: Sequence[int], width: int) -> list[ColumnBlock]:
    """All columns, by group and tensor name: the same sums whatever order a file stores."""
    sizes = [spec.size for spec in specs]
    offsets = [0, *accumulate(sizes)]
    found: list[ColumnBlock] = []
    order = sorted(range(len(sizes)), key=lambda t: (groups[t], specs[t].name))
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


@lru_cache(maxsize=16)
def sum_spans(specs: tuple[TensorSpec, ...], groups: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Spans of one sum over clients: wide, and still several for several threads."""
    parameters = sum(spec.size for spec in specs)
    return tuple(spans(specs, groups, min(SUM, max(COLUMNS, parameters // 8 // 64 * 64))))


def spans(specs: Sequence[TensorSpec], groups: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """All columns in the order of the flat update: group, start and stop of at most `width` of one group.

    >>> spans([TensorSpec("a", (4,)), TensorSpec("b", (3,)), TensorSpec("c", (2,))], [0, 0, 1], 5)
    [(0, 0, 5), (0, 5, 7), (1, 7, 9)]
    """
    found, start = [], 0
    sizes = zip(groups, (spec.size for spec in specs), strict=True)
    for group, tensors in groupby(sizes, key=itemgetter(0)):
        stop = start + sum(size for _, size in tensors)
        found += [(group, at, min(at + width, stop)) for at in range(start, stop, width)]
        start = stop
    return found


def side_by_side(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The parts as one (m, b) matrix, copied into the same memory in the same layout.

    BLAS and sums round differently by stride and alignment: a copy makes all sources give the same bits.
    """
    m, b = parts[0].shape[0], sum(part.shape[1] for part in parts)
    found = scratch("block", m * (b + APART), dtype, parts[0].device).view(m, b + APART)[:, :b]
    at = 0
    for part in parts:
        found[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return found


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


T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """Give `work(task)` of every task, in their order: the number of threads changes no bit.

    There are as many threads as PyTorch would use here (`torch.set_num_threads`); until the last result is
    taken, products of the calling thread run on it alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if min(threads, len(tasks)) == 1:
            yield from map(work, tasks)
            return
        with ThreadPoolExecutor(min(threads, len(tasks)), initializer=_prepare) as pool:
            yield from pool.map(work, tasks)
    finally:
        torch.set_num_threads(threads)


def _prepare() -> None:
    """Both settings belong to a thread."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
