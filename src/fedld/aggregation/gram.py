"""The two passes over the updates: Gram matrices, and the combination G c. Nothing else touches all of G."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedld.aggregation.rule import Array
from fedld.aggregation.sources import Source

COLUMNS = 16384  # of one product: long enough for sgemm, short enough for the cache and for float32 sums
BYTES = 32 << 20  # of one block of all clients
SMALLEST, LARGEST = 1e-28, 1e34  # mean square and sum of squares that float32 still holds exactly enough


def ranges(source: Source, columns: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, start, stop) of the blocks that all passes and all kinds of sources share."""
    products = max(1, BYTES // (4 * source.clients * columns))
    for index, spec in enumerate(source.specs):
        for start in range(0, spec.size, columns * products):
            yield index, start, min(start + columns * products, spec.size)


def gram(source: Source, groups: Sequence[int], columns: int = COLUMNS) -> Array:
    """(groups, m, m) Gram matrices in float64; tensor t belongs to group groups[t].

    The matrix of a group is the sum of its tensors' matrices: a coarser granularity is a plain sum, and so are
    shards of the parameters on several servers.
    """
    m = source.clients
    K = np.zeros((max(groups) + 1, m, m))
    for index, start, stop in ranges(source, columns):
        K[groups[index]] += block_gram(source.read(index, start, stop), columns)
    return (K + K.transpose(0, 2, 1)) / 2


def block_gram(block: torch.Tensor, columns: int = COLUMNS) -> Array:
    """Gram matrix of the rows of one block: float32 products of `columns` columns, summed in float64.

    Squares below about 1e-38 vanish in float32 and above 1e38 overflow: such blocks are done in float64.
    """
    wide = block if block.dtype in (torch.float32, torch.float64) else block.float()
    K = _products(wide, columns)
    if wide.dtype == torch.float32:
        squares = K.diagonal()
        if not bool(((squares > SMALLEST * wide.shape[1]) & (squares < LARGEST)).all()):
            K = _products(wide.double(), columns)
    return K.cpu().numpy()


def _products(block: torch.Tensor, columns: int) -> torch.Tensor:
    """All pieces of `columns` columns in one batched product (threads share the batch), then the rest."""
    m, b = block.shape
    whole, step = b // columns, block.stride(1)
    rest = block[:, whole * columns :]
    K = (rest @ rest.T).double()
    if whole:
        pieces = block.as_strided(
            (whole, m, columns), (columns * step, block.stride(0), step), block.storage_offset()
        )
        K += torch.bmm(pieces, pieces.transpose(1, 2)).sum(dim=0, dtype=torch.float64)
    return K


def combine(
    source: Source, c: Array, groups: Sequence[int], keep: Sequence[int], columns: int = COLUMNS
) -> torch.Tensor:
    """The aggregate (d,): block by block c_g @ G over the kept clients."""
    out = torch.empty(sum(spec.size for spec in source.specs), dtype=source.dtype, device=source.device)
    wide = source.dtype if source.dtype in (torch.float32, torch.float64) else torch.float32
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


def kept_rows(block: torch.Tensor, keep: Sequence[int]) -> torch.Tensor:
    """The block without rejected clients: 0 times a non-finite number is not 0."""
    return block if len(keep) == block.shape[0] else block[list(keep)]
