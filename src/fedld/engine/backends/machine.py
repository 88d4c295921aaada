"""Engines of one machine, and engines by name."""

import os
import warnings
from pathlib import Path

from fedld.config.experiment import Experiment
from fedld.config.own import stays_here
from fedld.config.resolve import make_federation
from fedld.data import Federation
from fedld.engine.backends.base import Backend, Engine
from fedld.engine.backends.inprocess import InProcess
from fedld.engine.backends.pool import WorkerPool, count_workers
from fedld.engine.jobs import Setup, SharedMemory
from fedld.engine.memory import check_memory
from fedld.errors import FedLDError, nearest


class ThisMachine:
    """This machine: the dataset's clients, trained by worker processes or in this process.

    Args:
        workers: number of worker processes, 0 for this process; None: as the setting `workers` says.
    """

    keeps_states: bool = True

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers

    def __repr__(self) -> str:
        return f"ThisMachine(workers={self.workers})"

    def federation(self, experiment: Experiment) -> Federation:
        """The user's own, or the dataset divided among clients."""
        return make_federation(experiment)

    def shares_memory(self, setup: Setup) -> bool:
        """Whether there are worker processes."""
        return self._count(setup.experiment) > 0

    def check(self, setup: Setup, rows: int) -> None:
        """Is there memory enough for all workers, and can they have the user's own parts?"""
        asked = self._asked(setup.experiment)
        if asked != 0 and (why := stays_here(setup.experiment.own, asked=asked is not None)):
            warnings.warn(f"{why}: the run stays in this process", stacklevel=4)
        check_memory(setup, rows, self._count(setup.experiment))

    def backend(self, setup: Setup, memory: SharedMemory) -> Backend:
        """Persistent workers, one per core unless told."""
        workers = self._count(setup.experiment)
        return WorkerPool(setup, memory, workers) if workers else InProcess(setup, memory)

    def provenance(self) -> dict[str, str]:
        """Nothing beyond what is in the run directory."""
        return {}

    def resuming(self, out: Path) -> str:
        """As any run."""
        return f"fedld run --resume {out}"

    def _asked(self, experiment: Experiment) -> int | None:
        return experiment.workers if self.workers is None else self.workers

    def _count(self, experiment: Experiment) -> int:
        return count_workers(experiment, self._asked(experiment))


THIS_MACHINE = ThisMachine()
SIMULATION = "flower-simulation"
ENGINES: dict[str, Engine] = {
    "local": THIS_MACHINE,
    "process": ThisMachine(workers=0),
    "workers": ThisMachine(workers=os.cpu_count() or 1),
}
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
    if isinstance(value, str):
        if value not in ENGINES:
            raise FedLDError(f"unknown engine '{value}': {nearest(value, [*ENGINES, SIMULATION])}")
        return ENGINES[value]
    missing = [name for name in NEEDED if not hasattr(value, name)]
    if isinstance(value, type) or missing:
        lacks = f"which has no '{missing[0]}'" if missing else "which is a class: make one of it"
        raise FedLDError(
            f"an engine is a name or a value with the methods of Engine, not {value!r:.80}, {lacks}"
        )
    return value


NEEDED = ("keeps_states", "federation", "shares_memory", "check", "backend", "provenance", "resuming")
"""What every engine has."""
