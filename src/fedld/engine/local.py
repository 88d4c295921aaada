"""Where jobs run on this machine: persistent worker processes of one thread each, or this process.

Every job is computed by one single-threaded worker from its own seeds, so results do not depend on how
many workers there are, nor on which of them took which job.
"""

import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor

from fedld.engine.experiment import Experiment
from fedld.engine.processes import end_with_parent, one_thread, processes, tune_process, without_main
from fedld.engine.work import Arena, Job, LossJob, PersonalJob, Result, Setup, TestJob, TrainJob, Worker
from fedld.errors import FedLDError
from fedld.layout import Tree

MAX_DEATHS = 3


@dataclass(frozen=True)
class Failure:
    """A job that raised: the last line of its traceback and the whole of it."""

    error: str
    detail: str


class TimeLimitError(FedLDError):
    """The jobs did not end in time."""


Done = Callable[[Job, Result | Failure], None]


class Backend(Protocol):
    """Where the jobs of a round run."""

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[Result | Failure]:
        """Do all jobs, in any order; results in the order of the jobs."""
        ...

    def close(self) -> None:
        """Release processes."""
        ...


def count_workers(experiment: Experiment) -> int:
    """Worker processes: as asked, else one a core, or one a GPU."""
    if experiment.device != "cpu" and not torch.cuda.is_available():
        raise FedLDError(f"device '{experiment.device}' asked for, but torch sees no GPU here")
    if experiment.workers is not None:
        return experiment.workers
    return mp.cpu_count() if experiment.device == "cpu" else torch.cuda.device_count()


def allocate(setup: Setup, rows: int) -> Arena:
    """The memory that workers share."""
    size, tests = setup.layout.size, len(setup.federation.test)
    return Arena(
        _shared(size),
        _shared(rows, size),
        _shared(tests, len(setup.federation.classes)),
    )


def _shared(*shape: int) -> Tensor:
    return torch.zeros(*shape).share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def attempt(worker: Worker, job: Job) -> Result | Failure:
    """Do a job; what it raises becomes a `Failure`."""
    try:
        return worker.run(job)
    except Exception as error:
        return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


class InProcess:
    """Jobs one after the other in this process: for grids of runs, and for debugging."""

    def __init__(self, setup: Setup, arena: Arena) -> None:
        tune_process()
        self.worker = Worker(setup, arena)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[Result | Failure]:
        """Do all jobs."""
        self.worker.common = common
        results = []
        for job in jobs:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeLimitError("the round did not end within its time limit")
            results.append(attempt(self.worker, job))
            if done is not None:
                done(job, results[-1])
        return results

    def close(self) -> None:
        """Nothing to release."""


class WorkerPool:
    """Worker processes that live as long as the run."""

    def __init__(self, setup: Setup, arena: Arena, workers: int) -> None:
        self._setup, self._arena = setup, arena
        self._context: Any = processes()
        self._members = [self._start(rank) for rank in range(workers)]

    def _start(self, rank: int) -> "_Member":
        ours, theirs = self._context.Pipe()
        method = self._setup.method
        with one_thread(), without_main(method, method.objective, method.rule):
            process = self._context.Process(
                target=_serve, args=(self._setup, self._arena, theirs, rank), daemon=True
            )
            process.start()
        theirs.close()
        return _Member(process, ours)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[Result | Failure]:
        """Do all jobs, the longest first; a job whose worker dies is done again by a new one."""
        results: dict[int, Result | Failure] = {}
        waiting = sorted(range(len(jobs)), key=lambda i: self._cost(jobs[i]))
        deaths = 0
        for member in self._members:
            member.common = common
        while len(results) < len(jobs):
            for k, member in enumerate(self._members):
                if member.job is None and waiting and not self._hand(member, waiting, jobs):
                    self._members[k] = replace(self._start(k), common=common)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            busy = [m for m in self._members if m.job is not None]
            ready = wait([m.connection for m in busy], left)
            if not ready and left is not None:
                self._restart()
                raise TimeLimitError("the round did not end within its time limit")
            for k, member in enumerate(self._members):
                if member.connection not in ready:
                    continue
                index = member.job
                assert index is not None
                try:
                    results[index] = member.connection.recv()
                except (EOFError, ConnectionError, OSError):
                    deaths += 1
                    if deaths > MAX_DEATHS * len(self._members):
                        job = _describe(jobs[index], self._setup)
                        raise FedLDError(
                            f"workers keep dying on {job}: too little memory, or a script with a method of "
                            "its own that starts the run outside `if __name__ == '__main__':`"
                        ) from None
                    waiting.append(index)
                    member.process.join(5)
                    self._members[k] = replace(self._start(k), common=common)
                    continue
                member.job = None
                if done is not None:
                    done(jobs[index], results[index])
        return [results[i] for i in range(len(jobs))]

    def _hand(self, member: "_Member", waiting: list[int], jobs: Sequence[Job]) -> bool:
        """Give the longest waiting job to an idle worker; False if the worker is dead."""
        index = waiting.pop()
        try:
            member.connection.send((member.common, jobs[index]))
        except (ConnectionError, OSError):
            waiting.append(index)
            return False
        member.common, member.job = None, index
        return True

    def _cost(self, job: Job) -> float:
        """Expected time in forward passes; training on a sample costs about three."""
        clients = self._setup.federation.clients
        match job:
            case TrainJob():
                experiment = self._setup.experiment
                passes = 3 * experiment.local_epochs + 2 * experiment.client_losses
                return float(passes * len(clients[job.incoming.client].train))
            case LossJob():
                return float(sum(len(clients[j].train) for j in job.clients))
            case TestJob():
                return float(job.stop - job.start)
            case PersonalJob():
                return float(len(self._setup.federation.test))

    def _restart(self) -> None:
        """Kill every worker and start anew: what they were doing is no longer wanted."""
        self._kill()
        self._members = [self._start(rank) for rank in range(len(self._members))]

    def _kill(self) -> None:
        for member in self._members:
            member.process.kill()
            member.process.join(5)
            member.connection.close()

    def close(self) -> None:
        """End the workers; a worker holds nothing that is not on disk or in the arena."""
        self._kill()


@dataclass
class _Member:
    process: Any
    connection: Connection
    job: int | None = None
    common: Tree | None = None


def _serve(setup: Setup, arena: Arena, connection: Connection, rank: int) -> None:
    """A worker process: do jobs until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    tune_process()
    if setup.experiment.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    worker = Worker(setup, arena)
    while True:
        try:
            common, job = connection.recv()
        except (EOFError, ConnectionError):
            return
        if common is not None:
            worker.common = common
        connection.send(attempt(worker, job))


def _describe(job: Job, setup: Setup) -> str:
    match job:
        case TrainJob() | PersonalJob():
            return f"client '{setup.federation.clients[job.incoming.client].name}'"
        case _:
            return "an evaluation"
