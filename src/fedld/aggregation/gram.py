"""The two passes over the updates: Gram matrices, and the combination G c. Nothing else touches all of G.

Both go over independent blocks of columns on a few threads (`each`). Blocks are read at once, pieces are
multiplied at once; sums are taken in the order of the blocks, so the number of threads changes no bit.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch

from fedld.aggregation.report import Alignment
from fedld.aggregation.rule import Array, CoordinateRule
from fedld.aggregation.sketch import CountSketch
from fedld.aggregation.sources import Source, TensorSpec

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
    """Give columns of one product: fewer for many clients, so that the piece stays in the cache."""
    return min(block, max(256, PIECE // (4 * clients) // 64 * 64))


@lru_cache(maxsize=16)
def product_blocks(
    specs: tuple[TensorSpec, ...], groups: tuple[int, ...], clients: int, piece: int
) -> tuple[ColumnBlock, ...]:
    """Give blocks of a whole number of pieces each; the same in every round of a run."""
    return tuple(blocks(specs, groups, piece * max(1, BLOCK // (4 * clients * piece))))


def blocks(specs: Sequence[TensorSpec], groups: Sequence[int], width: int) -> list[ColumnBlock]:
    """Give all columns, by group and tensor name: the same sums whatever order a file stores."""
    sizes = [spec.size for spec in specs]
    offsets = [0, *accumulate(sizes)]
    made: list[ColumnBlock] = []
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
                    made.append(ColumnBlock(group, start, tuple(parts)))
                    parts, start, filled = [], start + width, 0
        if parts:
            made.append(ColumnBlock(group, start, tuple(parts)))
    return made


@lru_cache(maxsize=16)
def sum_spans(specs: tuple[TensorSpec, ...], groups: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Give spans of one sum over clients: wide, and still several for several threads."""
    parameters = sum(spec.size for spec in specs)
    return tuple(spans(specs, groups, min(SUM, max(COLUMNS, parameters // 8 // 64 * 64))))


def spans(specs: Sequence[TensorSpec], groups: Sequence[int], width: int) -> list[tuple[int, int, int]]:
    """Give all columns in the order of the flat update: group, start, stop of at most `width` of one group.

    >>> spans([TensorSpec("a", (4,)), TensorSpec("b", (3,)), TensorSpec("c", (2,))], [0, 0, 1], 5)
    [(0, 0, 5), (0, 5, 7), (1, 7, 9)]
    """
    cut, start = [], 0
    sizes = zip(groups, (spec.size for spec in specs), strict=True)
    for group, tensors in groupby(sizes, key=itemgetter(0)):
        stop = start + sum(size for _, size in tensors)
        cut += [(group, at, min(at + width, stop)) for at in range(start, stop, width)]
        start = stop
    return cut


def side_by_side(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Give the parts as one (m, b) matrix, copied into the same memory in the same layout.

    BLAS and sums round differently by stride and alignment: a copy makes all sources give the same bits.
    """
    m, b = parts[0].shape[0], sum(part.shape[1] for part in parts)
    columns = scratch("block", m * (b + APART), dtype, parts[0].device).view(m, b + APART)[:, :b]
    at = 0
    for part in parts:
        columns[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    return columns


_memory = threading.local()


def scratch(purpose: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Give memory of this thread that is used again: fresh pages would cost more than the products."""
    bytes_ = size * dtype.itemsize
    memory: torch.Tensor | None = getattr(_memory, purpose, None)
    if memory is None or memory.numel() < bytes_ or memory.device != device:
        memory = torch.empty(max(bytes_, PIECE), dtype=torch.uint8, device=device)
        setattr(_memory, purpose, memory)
    return memory[:bytes_].view(dtype)


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
    """Set what belongs to a thread."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


TILE = 32  # rows: with more clients the tiles below the diagonal are left out, smaller tiles multiply slower
TURNS, TASKS = 8, 16  # sketched at once are so many times k columns; in so many tasks, at most
SMALLEST, LARGEST = 1e-28, 1e34  # mean square and sum of squares that float32 squares can be trusted with


@dataclass(frozen=True)
class Grams:
    """Gram matrices (groups, m, m); sketched ones also from each half of the buckets, for their error."""

    K: Array
    halves: tuple[Array, ...] = ()

    def only(self, keep: Sequence[int]) -> "Grams":
        """Give those of some clients."""
        return Grams(self.K[:, keep][:, :, keep], tuple(half[:, keep][:, :, keep] for half in self.halves))


def gram(source: Source, groups: tuple[int, ...], columns: int = COLUMNS) -> Grams:
    """Compute (groups, m, m) Gram matrices in float64; tensor t belongs to group groups[t].

    The matrix of a group is the sum of its tensors' matrices: a coarser granularity is a plain sum, and so is
    the work of several servers that hold shards of the parameters.
    """
    width = piece_columns(source.clients, columns)
    K = torch.zeros((max(groups) + 1, source.clients, source.clients), dtype=torch.float64)

    def work(block: ColumnBlock) -> torch.Tensor:
        parts = [source.read(part.tensor, part.start, part.stop) for part in block.ranges]
        return parts_gram(parts, width).cpu()

    every = product_blocks(tuple(source.specs), groups, source.clients, width)
    for block, product in zip(every, each(work, every), strict=True):
        K[block.group] += product
    return Grams(K.numpy())


def parts_gram(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Compute the Gram matrix of some columns: float32 products of `width` columns, summed in float64.

    Squares below 1e-38 vanish in float32 and above 1e38 overflow: such blocks are done in float64.
    """
    dtype = working_dtype(parts[0].dtype)
    K = _products(side_by_side(parts, dtype), width)
    if dtype == torch.float32:
        squares, b = K.diagonal(), sum(part.shape[1] for part in parts)
        if not bool(((squares > SMALLEST * b) & (squares < LARGEST)).all()):
            K = _products(side_by_side(parts, torch.float64), width)
    return K


def _products(X: torch.Tensor, width: int) -> torch.Tensor:
    """Sum over pieces P of P P', each `width` columns of X, in float64 between pieces.

    All pieces are multiplied in one call: with two threads the interpreter is what they would wait for.
    """
    m, whole = X.shape[0], X.shape[1] // width * width
    K = torch.zeros(m, m, dtype=torch.float64, device=X.device)
    pieces = [X[:, :whole].view(m, -1, width).transpose(0, 1), X[:, whole:].unsqueeze(0)]
    for stack in (stack for stack in pieces if stack.numel()):
        for row in range(0, m, TILE):
            products = torch.bmm(stack[:, row : row + TILE], stack[:, row:].transpose(1, 2))
            K[row : row + TILE, row:] += products.sum(dim=0, dtype=torch.float64)
    return K.triu() + K.triu(1).T


def sketched_gram(source: Source, sketch: CountSketch) -> Grams:
    """Give the model's Gram matrix from the updates' sketches, in one pass that costs m d and not m^2 d."""
    k, m = sketch.buckets, source.clients
    sketches = torch.zeros((m, k), dtype=working_dtype(source.dtype))

    def work(some: Sequence[ColumnBlock]) -> torch.Tensor:
        part = torch.zeros(m, k, dtype=sketches.dtype, device=source.device)
        for block in some:
            at = block.start
            for span in block.ranges:
                columns = source.read(span.tensor, span.start, span.stop)
                sketch.add(part, columns, at)
                at += columns.shape[1]
        return part.cpu()

    every = blocks(source.specs, [0] * len(source.specs), TURNS * k)
    share = -(-len(every) // TASKS)  # each task has a sketch of its own, so there are few
    for part in each(work, [every[at : at + share] for at in range(0, len(every), share)]):
        sketches.add_(part)
    width = piece_columns(m)
    halves = [[half] for half in torch.split(sketches, k // 2, dim=1)]
    first, second = (product.numpy()[None] for product in each(partial(parts_gram, width=width), halves))
    return Grams(first + second, (2 * first, 2 * second))


def combine(
    source: Source, c: Array, groups: tuple[int, ...], keep: Sequence[int]
) -> tuple[torch.Tensor, bool]:
    """Give the aggregate (d,), c_g @ G over the kept clients, and whether its sum is finite."""
    out, dtype = empty_update(source), working_dtype(source.dtype)

    def work(span: tuple[int, int, int]) -> bool:
        group, start, stop = span
        weights = dict(zip(keep, c[group].tolist(), strict=True))
        rows = ((source.row(client, start, stop).to(dtype), weight) for client, weight in weights.items())
        values = out[start:stop].copy_(weighted_sum(rows))
        return math.isfinite(values.sum(dtype=dtype))

    finite = [*each(work, sum_spans(tuple(source.specs), groups))]
    return out, all(finite)


def weighted_sum(rows: Iterable[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """Sum of row times weight, in memory that is used again.

    Row after row over a long range: this reads memory as fast as it comes, and products and sums of two
    numbers round alike wherever they lie. Not in one operation (`add_` with alpha), which would not round
    the product: opposite updates would not cancel.
    """
    total: torch.Tensor | None = None
    for row, weight in rows:
        purpose = "total" if total is None else "product"
        product = torch.mul(row, weight, out=scratch(purpose, len(row), row.dtype, row.device))
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def coordinates(
    source: Source, rule: CoordinateRule, p: Array, keep: Sequence[int], columns: int = COLUMNS
) -> tuple[torch.Tensor, Alignment]:
    """Give the aggregate (d,) of a rule outside Gram space, and its inner products, gathered on the way."""
    out, dtype = empty_update(source), working_dtype(source.dtype)
    weights = torch.from_numpy(p).to(source.device)
    width, groups = piece_columns(source.clients, columns), (0,) * len(source.specs)
    total = Alignment(0.0, np.zeros(len(keep)))

    def work(block: ColumnBlock) -> list[Alignment]:
        read = [source.read(part.tensor, part.start, part.stop) for part in block.ranges]
        parts = [kept_rows(part, keep) for part in read]
        products, found = [], []
        for piece in torch.split(side_by_side(parts, dtype), width, dim=1):
            products.append(rule(piece, weights))
            exact = products[-1].double()
            found.append(Alignment(float(exact @ exact), (piece.double() @ exact).cpu().numpy()))
        scatter(out, block, torch.cat(products))
        return found

    for found in each(work, product_blocks(tuple(source.specs), groups, source.clients, width)):
        for part in found:
            total = Alignment(total.square + part.square, total.dots + part.dots)
    return out, total


def inner(source: Source, vector: torch.Tensor, groups: tuple[int, ...], columns: int = COLUMNS) -> Array:
    """Compute (groups, m) inner products of every update with one flat vector (d,)."""
    dots = torch.zeros((max(groups) + 1, source.clients), dtype=torch.float64)
    width = piece_columns(source.clients, columns)

    def work(block: ColumnBlock) -> torch.Tensor:
        other = torch.cat([vector[part.place] for part in block.ranges]).to(source.device, torch.float64)
        parts = [source.read(part.tensor, part.start, part.stop) for part in block.ranges]
        pieces = torch.split(side_by_side(parts, torch.float64), width, dim=1)
        both = zip(pieces, torch.split(other, width), strict=True)
        return torch.stack([piece @ columns.clone() for piece, columns in both]).sum(dim=0).cpu()

    every = product_blocks(tuple(source.specs), groups, source.clients, width)
    for block, product in zip(every, each(work, every), strict=True):
        dots[block.group] += product
    return dots.numpy()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the type to compute in: half precision is computed in float32, everything else as it is."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def empty_update(source: Source) -> torch.Tensor:
    """Allocate room for the aggregate.

    On a CPU from NumPy, which asks for huge pages: faults cost more than sums.
    """
    size = sum(spec.size for spec in source.specs)
    if source.device.type != "cpu":
        return torch.empty(size, dtype=source.dtype, device=source.device)
    return torch.from_numpy(np.empty(size * source.dtype.itemsize, dtype=np.uint8)).view(source.dtype)


def kept_rows(block: torch.Tensor, keep: Sequence[int]) -> torch.Tensor:
    """Give the block without rejected clients: 0 times a non-finite number is not 0."""
    return block if len(keep) == block.shape[0] else block[list(keep)]
