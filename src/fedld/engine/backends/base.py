"""What the round loop needs of an engine: two protocols, `Engine` and `Backend`.

An engine is a value: `fedld.run(..., engine=...)` takes one by name or as an object of any class that has
these methods. The loop knows nothing else about where clients train.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from fedld.config.experiment import Experiment
from fedld.data import Federation
from fedld.engine.jobs import Done, Failure, Job, JobResult, Setup, SharedMemory
from fedld.layout import Tree
from fedld.transforms import CombinedTotal, SummedEntry, Total


class Backend(Protocol):
    """Run the jobs of a round: train, evaluate, measure. An own one needs these two methods."""

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


@runtime_checkable
class SummingBackend(Protocol):
    """A backend of clients that keep their messages to themselves until these are summed."""

    def total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> Total:
        """Add up what the clients keep of the last jobs.

        Args:
            messages: by client, the form alone of what each keeps.
            weights: how much each client counts.
            entries: how each entry is added up.
        """
        ...

    def combine(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> CombinedTotal:
        """Combine the updates that the clients keep by their Gram matrix, and add up the other entries.

        Args:
            messages: by client, the form alone of what each keeps.
            weights: how much each client counts.
            entries: how each entry is added up.
        """
        ...


class Engine(Protocol):
    """Decide where a run happens: where its data are and who does the work.

    Attributes:
        keeps_states: whether the clients' states lie in the run directory, not at sites.

    >>> import fedld
    >>> engine = fedld.ThisMachine(workers=0)
    >>> result = fedld.run("fedavg", fedld.data("digits", clients=3), rounds=1, engine=engine)
    >>> result.summary["rounds"]
    1
    """

    keeps_states: bool

    def federation(self, experiment: Experiment) -> Federation:
        """Load the clients and the test set.

        Args:
            experiment: the settings.

        Returns:
            The federation.
        """
        ...

    def shares_memory(self, setup: Setup) -> bool:
        """Say whether other processes of this machine do the work.

        Args:
            setup: the resolved experiment.

        Returns:
            True if updates are exchanged through shared memory.
        """
        ...

    def check(self, setup: Setup, rows: int) -> None:
        """Refuse a run that cannot be done here.

        Args:
            setup: the resolved experiment.
            rows: number of clients that train in a round.

        Raises:
            FedLDError: memory does not suffice, or a part of the experiment cannot be used here.
        """
        ...

    def backend(self, setup: Setup, memory: SharedMemory) -> Backend:
        """Start what runs the jobs.

        Args:
            setup: the resolved experiment.
            memory: the matrix of updates and the current model.

        Returns:
            The backend; the caller closes it.
        """
        ...

    def provenance(self) -> dict[str, str]:
        """Describe the run's origin for the model file; called when the run is done.

        Returns:
            Texts by name.
        """
        ...

    def resuming(self, out: Path) -> str:
        """Give the command that continues a stopped run.

        Args:
            out: the run's folder.

        Returns:
            A command line.
        """
        ...
