"""Grids of runs: each run single-threaded in one process, as many at a time as there are cores.

A run does not depend on the number of workers, so running whole runs side by side gives the same results
as one run on all cores, and nobody waits at the end of a round.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from fedld.engine import loop
from fedld.engine.experiment import Experiment
from fedld.engine.processes import end_with_parent, one_thread, processes, tune_process
from fedld.engine.records import Line
from fedld.engine.setup import LOCAL, Engine
from fedld.errors import FedLDError


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    label: str
    experiment: Experiment
    path: Path


def run_cell(cell: Cell, progress: Callable[[Line], None], engine: Engine = LOCAL) -> Line:
    """Run a cell, continue it, or give the summary of a finished one."""
    if (cell.path / "config.toml").exists():
        if (cell.path / "config.toml").read_text() != cell.experiment.to_toml():
            raise FedLDError(f"'{cell.path}' holds a run with other settings: choose another --out")
        return loop.resume(cell.path, progress=progress, engine=engine)
    return loop.run(cell.experiment, cell.path, progress=progress, engine=engine)


def run_grid(cells: Sequence[Cell], *, jobs: int | None, progress: Callable[[Line], None]) -> list[Line]:
    """Summaries of all cells, in order; finished ones are not run again."""
    context: Any = processes()
    jobs = min(jobs or os.cpu_count() or 1, len(cells))
    events: Any = context.Queue()
    listener = Thread(target=_listen, args=(events, progress), daemon=True)
    listener.start()
    with one_thread(), ProcessPoolExecutor(jobs, context, _begin, (events,)) as pool:
        futures = [pool.submit(_work, cell) for cell in cells]
        try:
            _wait(futures)
        except BrokenProcessPool:
            raise FedLDError("a run's process died; continue with the same command and --resume") from None
        except BaseException:
            for process in (pool._processes or {}).values():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            events.put(None)
    listener.join()
    return [future.result() for future in futures]


def _wait(futures: list[Future[Line]]) -> None:
    for future in as_completed(futures):
        future.result()


_events: Any = None


def _begin(events: Any) -> None:
    global _events
    _events = events
    end_with_parent()
    tune_process()


def _work(cell: Cell) -> Line:
    return run_cell(cell, lambda line: _events.put({**line, "run": cell.path.name}))


def _listen(events: Any, progress: Callable[[Line], None]) -> None:
    while (line := events.get()) is not None:
        progress(line)
