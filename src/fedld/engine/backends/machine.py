"""Engines of one machine, and engines by name."""

import os
import warnings
from pathlib import Path
from typing import Any

from fedld.config.experiment import Experiment
from fedld.config.own import stays_here
from fedld.config.resolve import make_federation
from fedld.data import Federation
from fedld.engine.backends.base import Backend, Engine
from fedld.engine.backends.inprocess import InProcess
from fedld.engine.backends.pool import WorkerPool, count_workers
from fedld.engine.jobs import Setup, SharedMemory
from fedld.engine.memory import check_memory
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
        if asked != 0 and (why := stays_here(setup.experiment.own, asked=asked is not None)):
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
