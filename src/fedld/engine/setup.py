"""Before the first round: whose data, which model, who does the work, and who is drawn."""

from pathlib import Path
from typing import Protocol

from fedld.data import Federation, load
from fedld.engine.experiment import Experiment
from fedld.engine.local import Backend, InProcess, WorkerPool, count_workers
from fedld.engine.memory import check_memory
from fedld.engine.work import Arena, Setup, initial_model, make_layout
from fedld.errors import FedLDError
from fedld.methods import Server
from fedld.seeds import numpy_generator


class Engine(Protocol):
    """Where a run happens: whose data it trains on and who does the work."""

    def federation(self, experiment: Experiment) -> Federation:
        """The clients and the test set."""
        ...

    def backend(self, setup: Setup, arena: Arena) -> Backend:
        """Who runs the jobs."""
        ...


class Local:
    """This machine: the dataset's clients, worker processes (or this process when `workers` is 0)."""

    def federation(self, experiment: Experiment) -> Federation:
        """The dataset, divided among clients."""
        return load(experiment.data_spec())

    def backend(self, setup: Setup, arena: Arena) -> Backend:
        """Persistent workers, one a core unless told."""
        workers = count_workers(setup.experiment)
        return WorkerPool(setup, arena, workers) if workers else InProcess(setup, arena)


LOCAL = Local()


def prepare(experiment: Experiment, states: Path, engine: Engine = LOCAL) -> tuple[Setup, Server]:
    """Data, method and model of an experiment, checked; and the server's first state."""
    method = experiment.make_method()
    federation = method.federation(engine.federation(experiment))
    rows = len(sample(experiment, len(federation.clients), 1))
    model = initial_model(experiment, method, federation)
    layout = make_layout(experiment, method, model)
    server = method.init(layout.flatten(model), layout, len(federation.clients))
    setup = Setup(experiment, method, federation, layout, states)
    check_memory(setup, rows, count_workers(experiment))
    return setup, server


def sample(experiment: Experiment, clients: int, round_: int) -> list[int]:
    """The clients of a round, by number or rate, from the round's own generator."""
    if clients == 1:
        return [0]  # pooled data has nobody to leave out
    wanted = experiment.sample_clients or max(1, round(experiment.sample_rate * clients))
    if wanted > clients:
        raise FedLDError(f"cannot sample {wanted} of {clients} clients")
    generator = numpy_generator(experiment.seed, "sample", round_)
    return sorted(int(i) for i in generator.choice(clients, wanted, replace=False))
