"""What the round loop needs of an engine: two protocols, `Engine` and `Backend`.

An engine is a value: `fedld.run(..., engine=...)` takes one by name or as an object of any class that has
these methods. The loop knows nothing else about where clients train.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fedld.config.experiment import Experiment
from fedld.data import Federation
from fedld.engine.jobs import Done, Failure, Job, JobResult, Setup, SharedMemory
from fedld.layout import Tree


class Backend(Protocol):
    """Where the jobs of a round run."""

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[JobResult | Failure]:
        """Do all jobs, in any order.

        Args:
            jobs: what is to be done.
            common: what the method sends to every client in this round.
            done: called with every job and its result as soon as there is one.
            deadline: `time.monotonic()` after which training jobs are given up; None: never.

        Returns:
            The results in the order of the jobs; a `Failure` for a job that was not done.
        """
        ...

    def close(self) -> None:
        """Release processes and connections."""
        ...


class Engine(Protocol):
    """Where a run happens: whose data it trains on and who does the work.

    Attributes:
        keeps_states: whether the clients' states lie in the run directory, not at sites.
    """

    keeps_states: bool

    def federation(self, experiment: Experiment) -> Federation:
        """The clients and the test set."""
        ...

    def shares_memory(self, setup: Setup) -> bool:
        """Whether other processes of this machine do the work."""
        ...

    def check(self, setup: Setup, rows: int) -> None:
        """Refuse a run that cannot be done here, where so many clients train in a round."""
        ...

    def backend(self, setup: Setup, memory: SharedMemory) -> Backend:
        """Who runs the jobs."""
        ...

    def provenance(self) -> dict[str, str]:
        """What the model file says of where it comes from; asked when the run is done."""
        ...

    def resuming(self, out: Path) -> str:
        """The command that continues a run which was stopped."""
        ...
