"""The two passes over the updates: Gram matrices, and the combination G c. Nothing else touches all of G."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedld.aggregation.report import Alignment
from fedld.aggregation.rule import Array, CoordinateRule
from fedld.aggregation.sources import Source

COLUMNS = 16384  # of one product: long enough for sgemm, short enough for the cache and for float32 sums
BYTES = 32 << 20  # of one block of all clients
TILE = 32  # rows of one product: finer tiles save more of the symmetric work, but sgemm gets slow below this
SMALLEST, LARGEST = (
    1e-28,
    1e34,
)  # mean square and sum of squares between which float32 squares are exact enough


def ranges(source: Source, columns: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, start, stop) of the blocks that all passes and all kinds of sources share."""
    products = max(1, BYTES // (4 * source.clients * columns))
    for index, spec in enumerate(source.specs):
        for start in range(0, spec.size, columns * products):
            yield index, start, min(start + columns * products, spec.size)


def gram(source: Source, groups: Sequence[int], columns: int = COLUMNS) -> Array:
    """(groups, m, m) Gram matrices in float64; tensor t belongs to group groups[t].

    The matrix of a group is the sum of its tensors' matrices: a coarser granularity is a plain sum, and so is
    the work of several servers that hold shards of the parameters.
    """
    m = source.clients
    K = torch.zeros((max(groups) + 1, m, m), dtype=torch.float64)
    for index, start, stop in ranges(source, columns):
        K[groups[index]] += block_gram(source.read(index, start, stop), columns).cpu()
    return K.numpy()


def block_gram(block: torch.Tensor, columns: int = COLUMNS) -> torch.Tensor:
    """Gram matrix of the rows of one block: float32 products of `columns` columns, summed in float64.

    Squares below 1e-38 vanish in float32 and above 1e38 overflow: such blocks are done in float64.
    """
    wide = block.to(working_dtype(block.dtype))
    K = _products(wide, columns)
    if wide.dtype == torch.float32:
        squares = K.diagonal()
        if not bool(((squares > SMALLEST * wide.shape[1]) & (squares < LARGEST)).all()):
            K = _products(wide.double(), columns)
    return K


def _products(block: torch.Tensor, columns: int) -> torch.Tensor:
    """All pieces of `columns` columns in one batched product (threads share the batch), then the rest."""
    m, b = block.shape
    whole, step = b // columns, block.stride(1)
    K = _upper(block[:, whole * columns :].unsqueeze(0))
    if whole:
        strides = (columns * step, block.stride(0), step)
        K += _upper(block.as_strided((whole, m, columns), strides, block.storage_offset()))
    return K.triu() + K.triu(1).T


def _upper(pieces: torch.Tensor) -> torch.Tensor:
    """Sum over pieces of X X' in float64, tiles below the diagonal left out."""
    m = pieces.shape[1]
    K = torch.zeros(m, m, dtype=torch.float64, device=pieces.device)
    for row in range(0, m, TILE):
        tile, rest = pieces[:, row : row + TILE], pieces[:, row:]
        K[row : row + TILE, row:] = torch.bmm(tile, rest.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return K


def combine(
    source: Source, c: Array, groups: Sequence[int], keep: Sequence[int], columns: int = COLUMNS
) -> torch.Tensor:
    """The aggregate (d,): block by block c_g @ G over the kept clients."""
    out = empty_update(source)
    wide = working_dtype(source.dtype)
    coefficients = torch.from_numpy(c).to(source.device, wide)
    position = 0
    for index, start, stop in ranges(source, columns):
        block = kept_rows(source.read(index, start, stop), keep).to(wide)
        piece = out[position : position + stop - start]
        if wide == out.dtype:
            torch.mv(block.T, coefficients[groups[index]], out=piece)
        else:
            piece.copy_(block.T @ coefficients[groups[index]])
        position += stop - start
    return out


def coordinates(
    source: Source, rule: CoordinateRule, p: Array, keep: Sequence[int], columns: int = COLUMNS
) -> tuple[torch.Tensor, Alignment]:
    """The aggregate (d,) of a rule outside Gram space, and its inner products, gathered on the way."""
    out = empty_update(source)
    weights = torch.from_numpy(p).to(source.device)
    square, dots, position = 0.0, np.zeros(len(keep)), 0
    for index, start, stop in ranges(source, columns):
        block = kept_rows(source.read(index, start, stop), keep).to(working_dtype(source.dtype))
        piece = rule(block, weights)
        out[position : position + stop - start] = piece
        square += float(piece.double() @ piece.double())
        dots += (block.double() @ piece.double()).cpu().numpy()
        position += stop - start
    return out, Alignment(square, dots)


def inner(source: Source, vector: torch.Tensor, groups: Sequence[int], columns: int = COLUMNS) -> Array:
    """(groups, m) inner products of every update with one flat vector (d,)."""
    dots = np.zeros((max(groups) + 1, source.clients))
    position = 0
    for index, start, stop in ranges(source, columns):
        piece = vector[position : position + stop - start].double()
        dots[groups[index]] += (source.read(index, start, stop).double() @ piece).cpu().numpy()
        position += stop - start
    return dots


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32, everything else as it is."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def empty_update(source: Source) -> torch.Tensor:
    """Room for the aggregate."""
    return torch.empty(sum(spec.size for spec in source.specs), dtype=source.dtype, device=source.device)


def kept_rows(block: torch.Tensor, keep: Sequence[int]) -> torch.Tensor:
    """The block without rejected clients: 0 times a non-finite number is not 0."""
    return block if len(keep) == block.shape[0] else block[list(keep)]
