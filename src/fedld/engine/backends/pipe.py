"""Values through a pipe between this program's own processes, tensors as their bytes.

multiprocessing would pass each tensor as an open file, one per tensor and for as long as the tensor lives: a
thousand clients of a method that sends a message then need more files than a process may open.
"""

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Tensors as arrays of bytes, everything else as usual."""
        if not isinstance(value, Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


def _tensor(content: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content.copy()).view(dtype).reshape(shape)


def send(connection: Connection, value: Any) -> None:
    """Write a value to the other process."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    connection.send_bytes(buffer.getbuffer())


def receive(connection: Connection) -> Any:
    """Read what the other process wrote; both are this program, so unpickling is safe."""
    return pickle.loads(connection.recv_bytes())
