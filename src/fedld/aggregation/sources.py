"""Where updates come from: anything that gives the same range of one tensor for all clients.

A source never has to hold the whole m x d matrix; files are read range by range.
"""

import json
import math
import struct
import tokenize
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.paths import require_regular

Shape = tuple[int, ...]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one tensor of the model."""

    name: str
    shape: Shape

    @cached_property
    def size(self) -> int:
        """Number of parameters."""
        return math.prod(self.shape)

    @property
    def layer(self) -> str:
        """Tensor name up to the last dot.

        >>> TensorSpec("layer1.0.conv1.weight", (64,)).layer
        'layer1.0.conv1'
        """
        return self.name.rpartition(".")[0] or self.name


@runtime_checkable
class Source(Protocol):
    """The updates of all clients, readable in ranges."""

    @property
    def clients(self) -> int:
        """Number of clients m."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors that make up an update, in order."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""

    @property
    def device(self) -> torch.device:
        """Where the numbers are."""

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Compute (m, stop - start) block: that range of tensor `index`, flattened, one row per client."""

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """Compute (stop - start,) numbers of one client, counted over all tensors in their order."""

    def wrap(self, update: torch.Tensor) -> Any:
        """Give the flat aggregate (d,) in the form the updates came in."""


class MatrixSource:
    """An (m, d) matrix; `specs` names the column ranges. The rows may be slices of a wider buffer."""

    def __init__(self, matrix: torch.Tensor, specs: Sequence[TensorSpec], *, numpy: bool = False) -> None:
        self.matrix, self.specs, self.numpy = matrix, tuple(specs), numpy
        self.clients, self.dtype, self.device = matrix.shape[0], matrix.dtype, matrix.device
        self.offsets = [0, *accumulate(spec.size for spec in self.specs)]

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Give a view, never a copy."""
        offset = self.offsets[index]
        return self.matrix[:, offset + start : offset + stop]

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """Give a view, never a copy."""
        return self.matrix[client, start:stop]

    def wrap(self, update: torch.Tensor) -> Any:
        """Give a vector of the same library."""
        return update.numpy() if self.numpy else update


@dataclass(frozen=True)
class StateDictSource:
    """One mapping from tensor names to tensors per client."""

    states: Sequence[Mapping[str, torch.Tensor]]
    specs: Sequence[TensorSpec]

    @property
    def clients(self) -> int:
        """Number of state dicts."""
        return len(self.states)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensors."""
        return self.states[0][self.specs[0].name].dtype

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.states[0][self.specs[0].name].device

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Give the clients' ranges stacked."""
        name = self.specs[index].name
        return torch.stack([state[name].reshape(-1)[start:stop] for state in self.states])

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """Give the ranges of the tensors one after the other."""
        state = self.states[client]
        places = within(self.specs, start, stop)
        return torch.cat([state[self.specs[index].name].reshape(-1)[a:b] for index, a, b in places])

    def wrap(self, update: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give a state dict with the clients' names and shapes."""
        parts = torch.split(update, [spec.size for spec in self.specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self.specs, parts, strict=True)}


def within(specs: Sequence[TensorSpec], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Give tensor and range in it, for every tensor that columns start..stop of the flat update touch.

    >>> list(within([TensorSpec("a", (4,)), TensorSpec("b", (2, 3))], 3, 6))
    [(0, 3, 4), (1, 0, 2)]
    """
    for index, spec in enumerate(specs):
        if start < spec.size and stop > 0:
            yield index, max(start, 0), min(stop, spec.size)
        start, stop = start - spec.size, stop - spec.size


def matrix_source(updates: Any, tensors: Sequence[tuple[str, int]] | None) -> MatrixSource:
    """Give a source of an (m, d) tensor or array, checked."""
    if isinstance(updates, np.ndarray) and updates.dtype not in (np.float16, np.float32, np.float64):
        raise FedLDError(f"updates must be floating point numbers, not {updates.dtype}")
    matrix = _tensor(updates) if isinstance(updates, np.ndarray) else updates.detach()
    if matrix.dtype not in FLOATS:
        raise FedLDError(f"updates must be floating point numbers, not {matrix.dtype}")
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise FedLDError(
            f"updates must be a matrix (clients, parameters), not of shape {tuple(matrix.shape)}"
        )
    specs = column_specs(tuple(tensors) if tensors else (("update", matrix.shape[1]),))
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise FedLDError(f"tensor name '{max(names, key=names.count)}' is given twice")
    total = sum(spec.size for spec in specs)
    if total != matrix.shape[1]:
        raise FedLDError(f"the tensors add up to {total} parameters, but the updates have {matrix.shape[1]}")
    return MatrixSource(matrix, specs, numpy=isinstance(updates, np.ndarray))


@lru_cache(maxsize=8)
def column_specs(tensors: tuple[tuple[str, int], ...]) -> tuple[TensorSpec, ...]:
    """Give tensors that make up the columns of a matrix, from their names and lengths."""
    return tuple(TensorSpec(name, (int(size),)) for name, size in tensors)


def state_source(states: Sequence[Mapping[str, torch.Tensor]], clients: Sequence[str]) -> StateDictSource:
    """Give a source of a list of state dicts; their names, shapes and types must agree."""
    specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in states[0].items()]
    if not specs:
        raise FedLDError("the state dicts are empty")
    dtype = states[0][specs[0].name].dtype
    for client, state in zip(clients, states, strict=True):
        check_state(client, state, specs, dtype)
    return StateDictSource([{k: v.detach() for k, v in state.items()} for state in states], specs)


def check_state(
    client: str, state: Mapping[str, Any], specs: Sequence[TensorSpec], dtype: torch.dtype
) -> None:
    """Raise an error unless a client's tensors (with shape and dtype) are those of the first client."""
    for spec in specs:
        if spec.name not in state:
            raise FedLDError(f"client '{client}' lacks tensor '{spec.name}'")
        tensor = state[spec.name]
        if tuple(tensor.shape) != spec.shape:
            raise FedLDError(
                f"client '{client}': tensor '{spec.name}' has shape {tuple(tensor.shape)}, not {spec.shape}"
            )
        if tensor.dtype not in FLOATS:
            raise FedLDError(
                f"tensor '{spec.name}' holds {tensor.dtype}: aggregate floating point parameters only"
            )
        if tensor.dtype != dtype:
            raise FedLDError(f"client '{client}': tensor '{spec.name}' is {tensor.dtype}, not {dtype}")
    extra = set(state) - {spec.name for spec in specs}
    if extra:
        raise FedLDError(f"client '{client}' has a tensor '{min(extra)}' that the first client lacks")


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Give the array's own memory as a tensor.

    Nothing is written to it, so read-only memory maps are fine.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array if min(array.strides) > 0 else np.ascontiguousarray(array))


SAFETENSORS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
MALFORMED = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MemoryError),
    *(struct.error, SyntaxError, tokenize.TokenError),
)
NPY = {"<f2": torch.float16, "<f4": torch.float32, "<f8": torch.float64}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: type, shape and where its bytes begin."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class FileSource:
    """The updates of clients that are files with the same tensors; make it with `file_source`."""

    paths: Sequence[Path]
    entries: Sequence[Mapping[str, StoredTensor]]
    specs: Sequence[TensorSpec]
    dtype: torch.dtype

    @property
    def clients(self) -> int:
        """Number of files."""
        return len(self.paths)

    @property
    def device(self) -> torch.device:
        """Where blocks are read to."""
        return torch.device("cpu")

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Read that range of one tensor from every file.

        Files are opened one by one, so any number will do.
        """
        return torch.stack([self._range(client, index, start, stop) for client in range(self.clients)])

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """Read that part of one file."""
        return torch.cat([self._range(client, *place) for place in within(self.specs, start, stop)])

    def _range(self, client: int, index: int, start: int, stop: int) -> torch.Tensor:
        path, entry = self.paths[client], self.entries[client][self.specs[index].name]
        values = torch.empty(stop - start, dtype=self.dtype)
        room = values.view(torch.uint8).numpy().data
        with path.open("rb", buffering=0) as file:
            file.seek(entry.offset + start * self.dtype.itemsize)
            if file.readinto(room) != room.nbytes:
                raise FedLDError(f"{path} ended early: it changed while it was read")
        return values

    def wrap(self, update: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give a state dict with the files' names and shapes (an npy file holds one tensor, 'update')."""
        parts = torch.split(update, [spec.size for spec in self.specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self.specs, parts, strict=True)}


def file_source(paths: Sequence[str | Path]) -> FileSource:
    """Give a source of one .safetensors or .npy file per client; their names, shapes and types must agree."""
    files = [Path(path) for path in paths]
    if not files:
        raise FedLDError("there are no updates to aggregate")
    entries = [read_entries(path) for path in files]
    specs = [TensorSpec(name, entry.shape) for name, entry in entries[0].items()]
    if not specs:
        raise FedLDError(f"{files[0]} holds no tensors")
    dtype: Any = entries[0][specs[0].name].dtype
    for path, tensors in zip(files, entries, strict=True):
        check_state(str(path), tensors, specs, dtype)
    return FileSource(files, entries, specs, dtype)


def read_entries(path: Path) -> dict[str, StoredTensor]:
    """Give the tensors of one file, in the order of their bytes; an error names the malformed file."""
    readers = {".safetensors": _safetensors_entries, ".npy": _npy_entries}
    if path.suffix not in readers:
        raise FedLDError(f"{path} is neither a .safetensors nor a .npy file")
    try:
        require_regular(path)
        entries = readers[path.suffix](path)
        size = path.stat().st_size
    except OSError as error:
        raise FedLDError(f"{path} cannot be read: {error.strerror}") from None
    except MALFORMED:
        raise FedLDError(f"{path} is not a valid {path.suffix[1:]} file") from None
    for name, entry in entries.items():
        width = entry.dtype.itemsize if isinstance(entry.dtype, torch.dtype) else 0
        if entry.offset + width * TensorSpec(name, entry.shape).size > size:
            raise FedLDError(f"{path} is too short for its tensor '{name}'")
    return entries


def _safetensors_entries(path: Path) -> dict[str, StoredTensor]:
    """Read 8 bytes of header length, a JSON header, then the tensors' bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {name: _safetensors_entry(value, 8 + length) for name, value in ordered}


def _safetensors_entry(value: Mapping[str, Any], base: int) -> StoredTensor:
    shape = tuple(value["shape"])
    begin, end = value["data_offsets"]
    dtype = SAFETENSORS.get(value["dtype"], value["dtype"])
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise ValueError
    if isinstance(dtype, torch.dtype) and end - begin != dtype.itemsize * TensorSpec("", shape).size:
        raise ValueError
    return StoredTensor(dtype, shape, base + begin)


def _npy_entries(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[version](file)
        if fortran and len(shape) > 1:
            raise ValueError
        return {"update": StoredTensor(NPY.get(dtype.str, str(dtype)), shape, file.tell())}
