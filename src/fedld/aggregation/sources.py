"""Where updates come from: anything that gives the same range of one tensor for all clients.

A source never has to hold the whole m x d matrix; files are read range by range.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fedld.errors import FedLDError

Shape = tuple[int, ...]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one tensor of the model."""

    name: str
    shape: Shape

    @property
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
        """(m, stop - start) block: that range of tensor `index`, flattened, one row per client."""

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) numbers of one client, counted over all tensors in their order."""

    def wrap(self, update: torch.Tensor) -> Any:
        """The flat aggregate (d,) in the form the updates came in."""


@dataclass(frozen=True)
class MatrixSource:
    """An (m, d) matrix; `tensors` names the column ranges. The rows may be slices of a wider buffer."""

    matrix: torch.Tensor
    specs: Sequence[TensorSpec]
    numpy: bool = False

    @property
    def clients(self) -> int:
        """Number of rows."""
        return self.matrix.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrix."""
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.matrix.device

    @cached_property
    def offsets(self) -> list[int]:
        """First column of each tensor."""
        return [0, *accumulate(spec.size for spec in self.specs)]

    def read(self, index: int, start: int, stop: int) -> torch.Tensor:
        """A view, never a copy."""
        offset = self.offsets[index]
        return self.matrix[:, offset + start : offset + stop]

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """A view, never a copy."""
        return self.matrix[client, start:stop]

    def wrap(self, update: torch.Tensor) -> Any:
        """A vector of the same library."""
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
        """The clients' ranges stacked."""
        name = self.specs[index].name
        return torch.stack([state[name].reshape(-1)[start:stop] for state in self.states])

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """The ranges of the tensors one after the other."""
        state = self.states[client]
        places = within(self.specs, start, stop)
        return torch.cat([state[self.specs[index].name].reshape(-1)[a:b] for index, a, b in places])

    def wrap(self, update: torch.Tensor) -> dict[str, torch.Tensor]:
        """A state dict with the clients' names and shapes."""
        parts = torch.split(update, [spec.size for spec in self.specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self.specs, parts, strict=True)}


def within(specs: Sequence[TensorSpec], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Tensor and range in it, for every tensor that columns start..stop of the flat update touch.

    >>> list(within([TensorSpec("a", (4,)), TensorSpec("b", (2, 3))], 3, 6))
    [(0, 3, 4), (1, 0, 2)]
    """
    for index, spec in enumerate(specs):
        if start < spec.size and stop > 0:
            yield index, max(start, 0), min(stop, spec.size)
        start, stop = start - spec.size, stop - spec.size


def matrix_source(updates: Any, tensors: Sequence[tuple[str, int]] | None) -> MatrixSource:
    """Source of an (m, d) tensor or array, checked."""
    if isinstance(updates, np.ndarray) and updates.dtype not in (np.float16, np.float32, np.float64):
        raise FedLDError(f"updates must be floating point numbers, not {updates.dtype}")
    matrix = _tensor(updates) if isinstance(updates, np.ndarray) else updates.detach()
    if matrix.dtype not in FLOATS:
        raise FedLDError(f"updates must be floating point numbers, not {matrix.dtype}")
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise FedLDError(
            f"updates must be a matrix (clients, parameters), not of shape {tuple(matrix.shape)}"
        )
    specs = [TensorSpec(name, (int(size),)) for name, size in tensors or [("update", matrix.shape[1])]]
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise FedLDError(f"tensor name '{max(names, key=names.count)}' is given twice")
    total = sum(spec.size for spec in specs)
    if total != matrix.shape[1]:
        raise FedLDError(f"the tensors add up to {total} parameters, but the updates have {matrix.shape[1]}")
    return MatrixSource(matrix, specs, isinstance(updates, np.ndarray))


def state_source(states: Sequence[Mapping[str, torch.Tensor]], clients: Sequence[str]) -> StateDictSource:
    """Source of a list of state dicts, whose names, shapes and types must agree."""
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
    """Error unless a client's tensors (anything with shape and dtype) are those of the first client."""
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
    """The array's own memory as a tensor; nothing is written to it, so read-only memory maps are fine."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array if min(array.strides) > 0 else np.ascontiguousarray(array))
