"""Engines of one machine, engines by name, and the memory that workers share.

That memory is the machine's shared memory, or where that is small, a mapped file: Docker gives a container
64 MB of /dev/shm; two updates of a ResNet-18 are more.
"""

import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedld.config.experiment import Experiment
from fedld.config.own import stays_here
from fedld.config.resolve import make_federation
from fedld.data import Federation
from fedld.engine.backends.base import Backend, Engine
from fedld.engine.backends.inprocess import InProcess
from fedld.engine.backends.pool import WorkerPool, count_workers
from fedld.engine.hardware import check_memory
from fedld.engine.jobs import Setup, Shapes, SharedMemory, map_file
from fedld.errors import FedLDError
from fedld.registry import Registry


class ThisMachine:
    """Train the dataset's clients on this machine, by worker processes or in this process.

    Args:
        workers: number of worker processes, 0 for this process; None: as the setting `workers` says.
    """

    keeps_states: bool = True

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers

    def __repr__(self) -> str:
        return f"ThisMachine(workers={self.workers})"

    def federation(self, experiment: Experiment) -> Federation:
        """Load the dataset and divide it among clients, or take the user's own federation.

        Args:
            experiment: the settings.

        Returns:
            The federation.
        """
        return make_federation(experiment)

    def shares_memory(self, setup: Setup) -> bool:
        """Say whether there are worker processes.

        Args:
            setup: the resolved experiment.

        Returns:
            True if there are.
        """
        return self._count(setup.experiment) > 0

    def check(self, setup: Setup, rows: int) -> None:
        """Refuse a run for which memory does not suffice; warn if own parts keep it in this process.

        Args:
            setup: the resolved experiment.
            rows: number of clients that train in a round.

        Raises:
            FedLDError: memory does not suffice.
        """
        asked = self._asked(setup.experiment)
        if asked != 0 and (why := stays_here(setup.experiment.own, processes_wanted=asked is not None)):
            warnings.warn(f"{why}: the run stays in this process", stacklevel=4)
        check_memory(setup, rows, self._count(setup.experiment))

    def backend(self, setup: Setup, memory: SharedMemory) -> Backend:
        """Start the worker processes, one per core unless `workers` says otherwise.

        Args:
            setup: the resolved experiment.
            memory: the matrix of updates and the current model.

        Returns:
            The backend.
        """
        workers = self._count(setup.experiment)
        return WorkerPool(setup, memory, workers) if workers else InProcess(setup, memory)

    def provenance(self) -> dict[str, str]:
        """Add nothing to the model file: the run directory has everything.

        Returns:
            An empty mapping.
        """
        return {}

    def resuming(self, out: Path) -> str:
        """Give the command that continues a stopped run.

        Args:
            out: the run's folder.

        Returns:
            A command line.
        """
        return f"fedld run --resume {out}"

    def _asked(self, experiment: Experiment) -> int | None:
        return experiment.workers if self.workers is None else self.workers

    def _count(self, experiment: Experiment) -> int:
        return count_workers(experiment, self._asked(experiment))


THIS_MACHINE = ThisMachine()
SIMULATION = "flower-simulation"


def _accept(value: Any) -> Engine:
    missing = [name for name in NEEDED if not hasattr(value, name)]
    if isinstance(value, type) or missing:
        lacks = f"which has no '{missing[0]}'" if missing else "which is a class: make one of it"
        raise FedLDError(
            f"an engine is a name or a value with the methods of Engine, not {value!r:.80}, {lacks}"
        )
    engine: Engine = value
    return engine


NEEDED = ("keeps_states", "federation", "shares_memory", "check", "backend", "provenance", "resuming")
"""What every engine has."""
ENGINES: Registry[Engine] = Registry(
    "engine",
    {
        "local": THIS_MACHINE,
        "process": ThisMachine(workers=0),
        "workers": ThisMachine(workers=os.cpu_count() or 1),
    },
    accept=_accept,
    reserved=(SIMULATION,),
)
"""Engines by name; `flower-simulation` is a run inside Flower, which makes its engine itself."""


def as_engine(value: Engine | str) -> Engine:
    """Take an engine by name or value.

    Args:
        value: a name of `ENGINES`, or an object with the methods of `Engine`.

    Returns:
        The engine.

    Raises:
        FedLDError: there is no such name, or the object lacks a method of the protocol.
    """
    engine: Engine = ENGINES.resolve(value)
    return engine


ENGINES.load_plugins()

SHM = Path("/dev/shm")
SPARE = 16 << 20  # of the machine's shared memory, for others


def allocate(setup: Setup, rows: int, *, shared: bool) -> SharedMemory:
    """Allocate the weights, `rows` updates, the logits of the test set, and the steps to choose from."""
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
    return SharedMemory(weights=weights, updates=updates, logits=logits, basis=basis)


def _zeros(shape: tuple[int, ...], *, shared: bool) -> Tensor:
    """Make zeros.

    Shared ones are written where they shall lie, or this process would keep pages of a copy.
    """
    if not shared:
        return torch.zeros(shape)
    tensor: Tensor = torch.empty(shape).share_memory_()  # type: ignore[no-untyped-call]
    return tensor.zero_()


def _room() -> int:
    return shutil.disk_usage(SHM).free if SHM.is_dir() else 0


def _in_file(file: Path, shapes: Shapes, needed: int) -> SharedMemory:
    """Make a file of the run's own, every block of it allocated now rather than missed by a worker later."""
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
