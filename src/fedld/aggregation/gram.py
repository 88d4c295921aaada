"""The two passes over the updates: Gram matrices, and the combination G c. Nothing else touches all of G."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from fedld.aggregation.report import Alignment
from fedld.aggregation.rule import Array, CoordinateRule
from fedld.aggregation.sources import Source

COLUMNS = 8192  # of one product: long enough for sgemm, short enough for the cache and for float32 sums
BYTES = 32 << 20  # of one block of all clients
SCRATCH = 4 << 20  # bytes of one batch of products
SMALLEST, LARGEST = 1e-28, 1e34  # mean square and sum of squares that float32 squares can be trusted with


@dataclass(frozen=True)
class Range:
    """Columns start..stop of one tensor, and their place in the flat update."""

    tensor: int
    start: int
    stop: int
    place: slice


def ranges(source: Source, columns: int, memory: int = BYTES) -> Iterator[Range]:
    """All columns in blocks, in the order of tensor names: the same sums whatever order a file stores."""
    width = columns * max(1, memory // (4 * source.clients * columns))
    sizes = [spec.size for spec in source.specs]
    offsets = [0, *accumulate(sizes)]
    for tensor in sorted(range(len(sizes)), key=lambda t: source.specs[t].name):
        for start in range(0, sizes[tensor], width):
            stop = min(start + width, sizes[tensor])
            yield Range(tensor, start, stop, slice(offsets[tensor] + start, offsets[tensor] + stop))


def read(source: Source, part: Range) -> torch.Tensor:
    """The block of one range in the type it is computed in."""
    return source.read(part.tensor, part.start, part.stop).to(working_dtype(source.dtype))


def gram(source: Source, groups: Sequence[int], columns: int = COLUMNS) -> Array:
    """(groups, m, m) Gram matrices in float64; tensor t belongs to group groups[t].

    The matrix of a group is the sum of its tensors' matrices: a coarser granularity is a plain sum, and so is
    the work of several servers that hold shards of the parameters.
    """
    m = source.clients
    K = torch.zeros((max(groups) + 1, m, m), dtype=torch.float64)
    memory = torch.empty(max(SCRATCH, 16 * m * columns), dtype=torch.uint8, device=source.device)
    for part in ranges(source, columns):
        K[groups[part.tensor]] += block_gram(read(source, part), columns, memory).cpu()
    return K.numpy()


def block_gram(block: torch.Tensor, columns: int, memory: torch.Tensor) -> torch.Tensor:
    """Gram matrix of the rows of one block: float32 products of `columns` columns, summed in float64.

    Squares below 1e-38 vanish in float32 and above 1e38 overflow: such blocks are done in float64.
    """
    K = _products(block, columns, memory.view(block.dtype))
    if block.dtype == torch.float32:
        squares = K.diagonal()
        if not bool(((squares > SMALLEST * block.shape[1]) & (squares < LARGEST)).all()):
            K = _products(block, columns, memory.view(torch.float64))
    return K


def _products(block: torch.Tensor, columns: int, memory: torch.Tensor) -> torch.Tensor:
    """Gram matrix: in the memory's precision per piece, in float64 between pieces."""
    m, b = block.shape
    K = torch.zeros(m, m, dtype=torch.float64, device=block.device)
    chunk = len(memory) // (m * columns) * columns
    for start in range(0, b, chunk):
        K += _upper(_pieces(block[:, start : start + chunk], columns, memory))
    return K.triu() + K.triu(1).T


def _pieces(chunk: torch.Tensor, columns: int, memory: torch.Tensor) -> torch.Tensor:
    """(n, m, width) pieces of at most `columns` columns, copied and filled up with zeros.

    BLAS rounds differently by memory layout and, for a single product, by the number of threads. A copy of at
    least two pieces always has the same layout, so all sources and thread counts give the same bits. The copy
    stays in the cache.
    """
    m, b = chunk.shape
    n = max(2, -(-b // columns))
    width = -(-b // n)
    copy = memory[: m * n * width].view(m, n * width)
    copy[:, :b] = chunk
    copy[:, b:] = 0
    return copy.view(m, n, width).transpose(0, 1)


def _upper(pieces: torch.Tensor) -> torch.Tensor:
    """Sum over pieces of X X' in float64, tiles below the diagonal left out."""
    m = pieces.shape[1]
    size = (
        4 if m <= 12 else 16
    )  # finer tiles save more of the symmetric work but run slower: best as measured
    K = torch.zeros(m, m, dtype=torch.float64, device=pieces.device)
    for row in range(0, m, size):
        tile, rest = pieces[:, row : row + size], pieces[:, row:]
        K[row : row + size, row:] = torch.bmm(tile, rest.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return K


def combine(
    source: Source, c: Array, groups: Sequence[int], keep: Sequence[int], columns: int = COLUMNS
) -> torch.Tensor:
    """The aggregate (d,): block by block c_g @ G over the kept clients."""
    out = empty_update(source)
    coefficients = torch.from_numpy(c).to(source.device, working_dtype(source.dtype))
    memory = torch.empty(SCRATCH // 4, dtype=coefficients.dtype, device=source.device)
    for part in ranges(source, columns):
        block, row = kept_rows(read(source, part), keep), coefficients[groups[part.tensor]]
        for start in range(0, block.shape[1], len(memory)):
            # Not straight into `out`: where a piece lies in memory would show in its last bit.
            piece = block[:, start : start + len(memory)]
            product = torch.mv(piece.T, row, out=memory[: piece.shape[1]])
            out[part.place][start : start + len(memory)] = product
    return out


def coordinates(
    source: Source, rule: CoordinateRule, p: Array, keep: Sequence[int], columns: int = COLUMNS
) -> tuple[torch.Tensor, Alignment]:
    """The aggregate (d,) of a rule outside Gram space, and its inner products, gathered on the way."""
    out = empty_update(source)
    weights = torch.from_numpy(p).to(source.device)
    square, dots = 0.0, np.zeros(len(keep))
    for part in ranges(source, columns, BYTES // 8):  # sorting a block takes many times its memory
        block = kept_rows(read(source, part), keep)
        piece = rule(block, weights)
        out[part.place] = piece
        square += float(piece.double() @ piece.double())
        dots += _dots(block, piece)
    return out, Alignment(square, dots)


def inner(source: Source, vector: torch.Tensor, groups: Sequence[int], columns: int = COLUMNS) -> Array:
    """(groups, m) inner products of every update with one flat vector (d,)."""
    dots = np.zeros((max(groups) + 1, source.clients))
    for part in ranges(source, columns):
        dots[groups[part.tensor]] += _dots(read(source, part), vector[part.place].to(source.device))
    return dots


def _dots(block: torch.Tensor, vector: torch.Tensor) -> Array:
    """Inner products of the rows with a vector in float64, from copies (see `_pieces`)."""
    rows = torch.empty_like(block, dtype=torch.float64, memory_format=torch.contiguous_format).copy_(block)
    return (rows @ vector.to(torch.float64, copy=True)).cpu().numpy()


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32, everything else as it is."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def empty_update(source: Source) -> torch.Tensor:
    """Room for the aggregate; on a CPU from NumPy, which asks for huge pages: faults cost more than sums."""
    size = sum(spec.size for spec in source.specs)
    if source.device.type != "cpu":
        return torch.empty(size, dtype=source.dtype, device=source.device)
    return torch.from_numpy(np.empty(size * source.dtype.itemsize, dtype=np.uint8)).view(source.dtype)


def kept_rows(block: torch.Tensor, keep: Sequence[int]) -> torch.Tensor:
    """The block without rejected clients: 0 times a non-finite number is not 0."""
    return block if len(keep) == block.shape[0] else block[list(keep)]
