"""Persistent worker processes of one thread each: which takes which job, and how values get to it and back.

Every job is computed by one single-threaded worker from its own seeds, so results do not depend on how many
workers there are, nor on which of them took which job.

Jobs go out longest first, each to the worker that would end it first: other programs may have taken half a
core. A worker that has been slow therefore leaves a long job near the end of a round to one that is still
busy but faster, and takes a shorter one, or none.

Tensors go through a pipe as their bytes. multiprocessing would pass each tensor as an open file, one per
tensor and for as long as the tensor lives: a thousand clients of a method that sends a message then need
more files than a process may open.
"""

import io
import pickle
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor

from fedld.config.experiment import Experiment
from fedld.config.own import stays_here
from fedld.engine.backends.inprocess import attempt_all, overdue, units
from fedld.engine.backends.processes import end_with_parent, one_thread, processes, tune_process, without_main
from fedld.engine.hardware import default_workers, find_device, worker_device
from fedld.engine.jobs import (
    CandidateJob,
    Done,
    Failure,
    Job,
    JobResult,
    LossJob,
    PersonalJob,
    PrepareJob,
    Setup,
    SharedMemory,
    SiteTestJob,
    TestJob,
    TrainJob,
)
from fedld.engine.worker import Worker
from fedld.errors import FedLDError
from fedld.layout import Tree

LEARN = 0.5  # weight of the newest job in a worker's pace


@dataclass(frozen=True)
class Unit:
    """Places of jobs that one worker does together, their kind, and what they cost in forward passes."""

    places: tuple[int, ...]
    kind: str
    cost: float


class Paces:
    """Seconds that jobs of a kind take per unit of cost, and how much slower than that each worker is."""

    def __init__(self, workers: int) -> None:
        self._rates: dict[str, float] = {}
        self._slowness = [1.0] * workers

    def expected(self, worker: int, unit: Unit) -> float:
        """Give seconds that a unit would take; before the first of its kind is done, its cost."""
        return unit.cost * self._rates.get(unit.kind, 1.0) * self._slowness[worker]

    def left(self, worker: int, unit: Unit, seconds: float) -> float:
        """Give seconds until a unit will be done that a worker has been at for some.

        One that is late stays so.
        """
        return max(self.expected(worker, unit) - seconds, seconds / 4)

    def learn(self, worker: int, unit: Unit, seconds: float) -> None:
        """Take note of a unit that is done."""
        if unit.cost <= 0 or seconds <= 0:
            return
        rate = seconds / unit.cost
        expected = self._rates.setdefault(unit.kind, rate / self._slowness[worker])
        self._slowness[worker] += LEARN * (rate / expected - self._slowness[worker])
        self._rates[unit.kind] += LEARN * (rate / self._slowness[worker] - expected)

    def choose(self, worker: int, waiting: Sequence[Unit], left: Sequence[float]) -> int | None:
        """Choose the place of the unit that an idle worker takes; None if others would end all earlier.

        The longest of `waiting` is the last; `left` are the seconds until each worker is free.
        """
        free = list(left)
        for place in reversed(range(len(waiting))):
            ends = [time + self.expected(k, waiting[place]) for k, time in enumerate(free)]
            first = min(range(len(ends)), key=lambda k: (ends[k], k != worker))
            if first == worker:
                return place
            free[first] = ends[first]
        return None


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors to arrays of bytes, everything else as usual."""
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


MAX_DEATHS = 3


def count_workers(experiment: Experiment, workers: int | None) -> int:
    """Count worker processes: as asked, else one per core, or one per GPU.

    None for values that must stay here.
    """
    device = find_device(experiment.device)
    if workers == 0 or stays_here(experiment.own, processes_wanted=workers is not None):
        return 0
    if workers is not None:
        return workers
    return default_workers(device, mp.cpu_count())


class WorkerPool:
    """Worker processes that live as long as the run."""

    def __init__(self, setup: Setup, memory: SharedMemory, workers: int) -> None:
        self._setup, self._memory = setup, memory
        self._context: Any = processes()
        self._paces = Paces(workers)
        self._members = [self._start(rank) for rank in range(workers)]

    def _start(self, rank: int) -> "_Member":
        ours, theirs = self._context.Pipe()
        method = self._setup.method
        with (
            one_thread(),
            without_main(method, *self._setup.experiment.own.values()),
        ):
            process = self._context.Process(
                target=_serve, args=(self._setup, self._memory, theirs, rank), daemon=True
            )
            process.start()
        theirs.close()
        return _Member(process=process, connection=ours)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[JobResult | Failure]:
        """Do all jobs, the longest first; if a worker dies, a new one does its job again."""
        results: dict[int, JobResult | Failure] = {}
        waiting = sorted(self._units(jobs), key=lambda unit: unit.cost)
        deaths = 0
        limit = 0.0 if deadline is None else deadline - time.monotonic()
        for member in self._members:
            member.common = common
        while len(results) < len(jobs):
            for k, member in enumerate(self._members):
                if member.unit is None and waiting and not self._hand(k, waiting, jobs):
                    self._members[k] = replace(self._start(k), common=common)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            busy = [m for m in self._members if m.unit is not None]
            if not busy:
                continue  # those that should have taken a job were dead
            ready = wait([m.connection for m in busy], left)
            if not ready and left is not None:
                # Training that is late is given up; evaluations that waited behind it get as long again.
                late = [i for i in range(len(jobs)) if i not in results]
                training = [i for i in late if isinstance(jobs[i], TrainJob)]
                results |= {i: overdue(limit) for i in training or late}
                given_up = self._give_up(common)
                waiting = [unit for unit in waiting + given_up if unit.places[0] not in results]
                deadline = time.monotonic() + limit
                continue
            for k, member in enumerate(self._members):
                if member.connection not in ready:
                    continue
                unit = member.unit
                assert unit is not None
                try:
                    results |= zip(unit.places, receive(member.connection), strict=True)
                except (EOFError, ConnectionError, OSError):
                    deaths += 1
                    if deaths > MAX_DEATHS * len(self._members):
                        job = _describe(jobs[unit.places[0]])
                        raise FedLDError(
                            f"workers keep dying on {job}: too little memory, or a script with a method of "
                            "its own that starts the run outside `if __name__ == '__main__':`"
                        ) from None
                    waiting.append(unit)
                    member.process.join(5)
                    self._members[k] = replace(self._start(k), common=common)
                    continue
                member.unit = None
                self._paces.learn(k, unit, time.monotonic() - member.since)
                for index in unit.places:
                    if done is not None:
                        done(jobs[index], results[index])
        return [results[i] for i in range(len(jobs))]

    def _hand(self, rank: int, waiting: list[Unit], jobs: Sequence[Job]) -> bool:
        """Give a waiting unit to an idle worker, if there is one for it; False if the worker is dead."""
        member, now = self._members[rank], time.monotonic()
        left = [m.unit and self._paces.left(k, m.unit, now - m.since) for k, m in enumerate(self._members)]
        place = self._paces.choose(rank, waiting, [seconds or 0.0 for seconds in left])
        if place is None:
            return True
        unit = waiting.pop(place)
        try:
            send(member.connection, (member.common, [jobs[i] for i in unit.places]))
        except (ConnectionError, OSError):
            waiting.append(unit)
            return False
        member.common, member.unit, member.since = None, unit, now
        return True

    def _units(self, jobs: Sequence[Job]) -> list[Unit]:
        """Give the jobs with their expected time.

        What is done together takes about as long as one of them.
        """
        grouped = units(jobs, self._setup, len(self._members))
        return [Unit(at, type(jobs[at[0]]).__name__, self._cost(jobs[at[0]])) for at in grouped]

    def _cost(self, job: Job) -> float:
        """Compute the expected time in forward passes; training on a sample costs about three."""
        sizes = self._setup.sizes
        match job:
            case TrainJob():
                experiment = self._setup.experiment
                size = sizes[job.incoming.client]
                steps = experiment.local_steps
                trained = steps * experiment.batch_size if steps else experiment.local_epochs * size
                return float(3 * trained + 2 * experiment.client_losses * size)
            case PrepareJob():
                return float(3 * sizes[job.incoming.client])
            case LossJob():
                return float(sum(sizes[client] for client in job.clients))
            case TestJob():
                return float(job.stop - job.start)
            case PersonalJob():
                return float(len(self._setup.federation.test))
            case SiteTestJob():
                return float(2 * len(self._setup.federation.client(job.incoming.client).test))
            case CandidateJob():
                return float(len(job.coefficients) * job.samples)

    def _give_up(self, common: Tree) -> list[Unit]:
        """Start every busy worker anew: what it was doing is no longer wanted, or is done again."""
        units = []
        for rank, member in enumerate(self._members):
            if member.unit is not None:
                units.append(member.unit)
                _end(member)
                self._members[rank] = replace(self._start(rank), common=common)
        return units

    def close(self) -> None:
        """End the workers; a worker holds nothing that is not on disk or in the memory."""
        for member in self._members:
            _end(member)


@dataclass(kw_only=True)
class _Member:
    process: Any
    connection: Connection
    unit: Unit | None = None
    common: Tree | None = None
    since: float = 0.0  # when it was handed its unit


def _end(member: _Member) -> None:
    member.process.kill()
    member.process.join(5)
    member.connection.close()


def _serve(setup: Setup, memory: SharedMemory, connection: Connection, rank: int) -> None:
    """Work as a worker process: do jobs until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    tune_process()
    worker = Worker(setup, memory, device=worker_device(find_device(setup.experiment.device), rank))
    while True:
        try:
            common, jobs = receive(connection)
        except (EOFError, ConnectionError):
            return
        if common is not None:
            worker.common = common
        send(connection, attempt_all(worker, jobs))


def _describe(job: Job) -> str:
    match job:
        case PrepareJob() | TrainJob() | PersonalJob() | CandidateJob():
            return f"client '{job.incoming.client}'"
        case _:
            return "an evaluation"
