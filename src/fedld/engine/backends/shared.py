"""The memory that workers share: in the machine's shared memory, or where that is small, in a mapped file.

Docker gives a container 64 MB of /dev/shm; two updates of a ResNet-18 are more.
"""

import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from fedld.engine.jobs import Setup, Shapes, SharedMemory, map_file
from fedld.errors import FedLDError

SHM = Path("/dev/shm")
SPARE = 16 << 20  # of the machine's shared memory, for others


def allocate(setup: Setup, rows: int, *, shared: bool) -> SharedMemory:
    """Room for the weights, `rows` updates, the logits of the test set, and the steps to choose from."""
    size, directions = setup.layout.size, setup.method.directions
    shapes: Shapes = (
        (size,),
        (rows, size),
        (len(setup.federation.test), *setup.federation.output_shape),
        (directions + 1 if directions else 0, size),
    )
    needed = 4 * sum(math.prod(shape) for shape in shapes)
    if shared and _room() < needed + SPARE:
        return _in_file(setup.states.with_name(".memory"), shapes, needed)
    weights, updates, logits, basis = (_zeros(shape, shared=shared) for shape in shapes)
    return SharedMemory(weights, updates, logits, basis)


def _zeros(shape: tuple[int, ...], *, shared: bool) -> Tensor:
    """Zeros; shared ones are written where they shall lie, or this process would keep pages of a copy."""
    if not shared:
        return torch.zeros(shape)
    tensor: Tensor = torch.empty(shape).share_memory_()  # type: ignore[no-untyped-call]
    return tensor.zero_()


def _room() -> int:
    return shutil.disk_usage(SHM).free if SHM.is_dir() else 0


def _in_file(file: Path, shapes: Shapes, needed: int) -> SharedMemory:
    """A file of the run's own, every block of it allocated now rather than missed by a worker later."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, needed)
    except OSError as error:
        file.unlink()
        raise FedLDError(
            f"the run needs {needed / 2**20:.0f} MiB that workers share, and neither {SHM} nor the disk of "
            f"'{file.parent}' has them ({error.strerror}): enlarge {SHM}, or take workers = 0"
        ) from None
    finally:
        os.close(descriptor)
    return map_file(file, shapes)
