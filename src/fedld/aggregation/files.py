"""Updates on disk: one safetensors or npy file per client, read range by range and never unpickled.

Files are read, not mapped: mapped pages would count as resident memory of the server.
"""

import json
import struct
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedld.aggregation.sources import TensorSpec, check_state, within
from fedld.errors import FedLDError
from fedld.paths import require_regular

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
        """That range of one tensor from every file; files are opened one by one, so any number will do."""
        return torch.stack([self._range(client, index, start, stop) for client in range(self.clients)])

    def row(self, client: int, start: int, stop: int) -> torch.Tensor:
        """That part of one file."""
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
        """A state dict with the files' names and shapes (an npy file holds one tensor, 'update')."""
        parts = torch.split(update, [spec.size for spec in self.specs])
        return {spec.name: part.view(spec.shape) for spec, part in zip(self.specs, parts, strict=True)}


def file_source(paths: Sequence[str | Path]) -> FileSource:
    """Source of one .safetensors or .npy file per client, whose names, shapes and types must agree."""
    files = [Path(path) for path in paths]
    if not files:
        raise FedLDError("there are no updates to aggregate")
    entries = [read_entries(path) for path in files]
    specs = [TensorSpec(name, entry.shape) for name, entry in entries[0].items()]
    if not specs:
        raise FedLDError(f"{files[0]} holds no tensors")
    dtype: Any = entries[0][specs[0].name].dtype
    for path, found in zip(files, entries, strict=True):
        check_state(str(path), found, specs, dtype)
    return FileSource(files, entries, specs, dtype)


def read_entries(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their bytes; an error names the malformed file."""
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
    """8 bytes of header length, a JSON header, then the tensors' bytes."""
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
