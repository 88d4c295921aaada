"""Jobs one after the other in this process."""

import math
import time
import traceback
from collections.abc import Sequence

from fedld.engine.backends.processes import tune_process
from fedld.engine.jobs import Done, Failure, Job, JobResult, PersonalJob, Setup, SharedMemory, TrainJob
from fedld.engine.worker import Worker
from fedld.layout import Tree

LARGEST_UNIT = 64  # personalised models with logits of the whole test set in memory at once


def attempt(worker: Worker, job: Job) -> JobResult | Failure:
    """Do a job; what it raises becomes a `Failure`."""
    try:
        return worker.run(job)
    except Exception as error:
        return _failure(error)


def attempt_all(worker: Worker, jobs: Sequence[Job]) -> list[JobResult | Failure]:
    """Do the jobs of one unit."""
    if len(jobs) == 1:
        return [attempt(worker, jobs[0])]
    try:
        return [*worker.personal([job for job in jobs if isinstance(job, PersonalJob)])]
    except Exception as error:
        return [_failure(error)] * len(jobs)


def _failure(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}", traceback.format_exc())


def units(jobs: Sequence[Job], setup: Setup, workers: int) -> list[tuple[int, ...]]:
    """Give places of jobs that are done together: of models with one body some per worker, others alone."""
    together = setup.one_body and setup.divisible
    personal = [i for i, job in enumerate(jobs) if together and isinstance(job, PersonalJob)]
    size = min(LARGEST_UNIT, math.ceil(len(personal) / workers)) or 1
    grouped = [tuple(personal[k : k + size]) for k in range(0, len(personal), size)]
    return [*((i,) for i in range(len(jobs)) if i not in set(personal)), *grouped]


def overdue(seconds: float) -> Failure:
    """Give the failure of a job that was not done in time."""
    return Failure(f"not done within {seconds:.3g} s (round_timeout)", "")


class InProcess:
    """Jobs one after the other in this process: for grids of runs, and for debugging."""

    def __init__(self, setup: Setup, memory: SharedMemory) -> None:
        tune_process()
        self.setup, self.worker = setup, Worker(setup, memory)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[JobResult | Failure]:
        """Do all jobs."""
        self.worker.common = common
        limit = 0.0 if deadline is None else deadline - time.monotonic()
        results: dict[int, JobResult | Failure] = {}
        for unit in units(jobs, self.setup, 1):
            mine = [jobs[i] for i in unit]
            late = deadline is not None and time.monotonic() > deadline and isinstance(mine[0], TrainJob)
            answers = [overdue(limit)] if late else attempt_all(self.worker, mine)
            results |= zip(unit, answers, strict=True)
            for job, result in zip(mine, answers, strict=True):
                if done is not None:
                    done(job, result)
        return [results[i] for i in range(len(jobs))]

    def close(self) -> None:
        """Release nothing."""
