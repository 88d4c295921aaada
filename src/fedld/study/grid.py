"""Grids of runs: each run single-threaded in one process, as many at a time as there are cores.

A run does not depend on the number of workers, so running whole runs side by side gives the same results
as one run on all cores, and no core waits at the end of a round. Processes live as long as the grid: nothing
is imported again for a run.
"""

import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from fedld.config.experiment import Experiment, make_experiment, read_toml
from fedld.config.own import stays_here
from fedld.engine import loop
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import THIS_MACHINE
from fedld.engine.backends.processes import (
    end_with_parent,
    one_thread,
    processes,
    tune_process,
    without_main,
)
from fedld.engine.callbacks import Callback
from fedld.errors import FedLDError, Interrupted
from fedld.records.schema import Event, RoundLine, Summary

if TYPE_CHECKING:
    from fedld.study.cluster import Cluster


class OtherSettings(FedLDError):  # noqa: N818 (reads as what is wrong)
    """A run that is to be continued was begun with other settings."""


Outcome = Summary | str
"""The result of a run, or why it failed."""
STOPPED = "stopped; what is finished is kept: continue with the same command and --resume"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a grid; `until` is the time of day (`time.time`) at which it has to be over, if any."""

    label: str
    experiment: Experiment
    path: Path
    engine: Engine = THIS_MACHINE
    until: float | None = None


class OutOfTime(FedLDError):  # noqa: N818 (reads as what happened)
    """A run has no time left; its rounds are kept."""


class Deadline(Callback):
    """Ends a run in time: after the round from which the next one might not be over.

    Args:
        until: the time of day.
        ends: the run is finished with the rounds that it has; else it can be continued.
    """

    sees_model = False

    def __init__(self, until: float, *, ends: bool = False) -> None:
        self.until, self.ends, self.longest = until, ends, 0.0

    def begin(self, experiment: Experiment, out: Path) -> None:
        """Refuse to begin when the time is over."""
        self.rounds = experiment.rounds
        if time.time() >= self.until and not self.ends:
            raise OutOfTime("no time was left for it")

    def after_round(self, line: RoundLine, model: Any) -> bool:
        """Compare what is left with the longest round."""
        self.longest = max(self.longest, line["seconds"])
        enough = line["round"] == self.rounds or time.time() + self.longest <= self.until
        if not enough and not self.ends:
            raise OutOfTime(f"its time was over after round {line['round']} of {self.rounds}")
        return not enough


def run_cell(cell: Cell, progress: Callable[[Event], None], callbacks: Sequence[Any] = ()) -> Summary:
    """Run a cell, continue it, or give the summary of a finished one."""
    check_settings(cell)
    if cell.until is not None:
        callbacks = [*callbacks, Deadline(cell.until)]
    if (cell.path / "config.toml").exists():
        return loop.resume(
            cell.path,
            progress=progress,
            own=cell.experiment.own,
            callbacks=callbacks,
            engine=cell.engine,
        )
    return loop.run(cell.experiment, cell.path, progress=progress, callbacks=callbacks, engine=cell.engine)


def check_settings(cell: Cell) -> None:
    """Check that a run that was begun has the cell's settings; a setting newer than the run had its default.

    Raises:
        OtherSettings: it was begun with others.
    """
    file = cell.path / "config.toml"
    if file.exists() and make_experiment(read_toml(file), cell.experiment.own).to_toml() != (
        cell.experiment.to_toml()
    ):
        raise OtherSettings(f"'{cell.path}' holds a run with other settings: choose another --out")


def run_grid(
    cells: Sequence[Cell],
    *,
    jobs: int | None,
    progress: Callable[[Event], None],
    cluster: "Cluster | None" = None,
) -> dict[Path, str]:
    """Run all cells that are not finished; gives the folders of those that failed, and why.

    A run that fails (it diverges, say) does not take the others with it; if all do, that is an error. Cells
    with values that cannot go to other processes are run here, one after the other.

    Raises:
        OtherSettings: a cell was begun with other settings; no cell is run.
        FedLDError: all cells failed.
    """
    for cell in cells:
        check_settings(cell)
    if cluster is None:
        outcomes = _run_all(cells, jobs, progress)
    else:
        from fedld.study.cluster import run_on_cluster

        outcomes = run_on_cluster(cells, cluster, jobs, progress)
    failed = {cell.path: why for cell, why in zip(cells, outcomes, strict=True) if isinstance(why, str)}
    if failed and len(failed) == len(cells):
        raise FedLDError(next(iter(failed.values())))
    return failed


def attempt(
    cell: Cell, progress: Callable[[Event], None], through: tuple[type[FedLDError], ...] = ()
) -> Outcome:
    """Run a cell; its failure is reported and returned, except errors `through` that the caller handles."""
    raised: tuple[type[FedLDError], ...] = (OtherSettings, Interrupted, *through)
    if cell.until is not None and time.time() >= cell.until:
        return "no time was left for it"
    try:
        return run_cell(cell, _teller(cell, progress))
    except raised:
        raise
    except FedLDError as error:
        progress({"event": "failed", "run": cell.path.name, "why": str(error)})
        return str(error)


def _run_all(cells: Sequence[Cell], jobs: int | None, progress: Callable[[Event], None]) -> list[Outcome]:
    """Run all cells in this process or in a pool; give their outcomes in order."""
    if jobs != 0 and (why := _stays_here(cells, jobs_given=jobs is not None)):
        warnings.warn(f"{why}: the runs stay in this process", stacklevel=2)
        jobs = 0
    if jobs == 0:
        try:
            return [attempt(cell, progress) for cell in cells]
        except Interrupted:
            raise Interrupted(STOPPED) from None
    context: Any = processes()
    jobs = min(jobs or os.cpu_count() or 1, len(cells))
    events: Any = context.Queue()
    listener = Thread(target=_listen, args=(events, progress), daemon=True)
    listener.start()
    with one_thread(), ProcessPoolExecutor(jobs, context, _begin, (events,)) as pool:
        try:
            outcomes = longest_first(cells, lambda: jobs, partial(_submit, pool))
        except BrokenProcessPool:
            raise FedLDError("a run's process died; continue with the same command and --resume") from None
        except BaseException as error:
            for process in (pool._processes or {}).values():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(STOPPED) from None
            raise
        finally:
            events.put(None)
    listener.join()
    return outcomes


def _submit(pool: ProcessPoolExecutor, cell: Cell) -> Future[Outcome]:
    """Hand a cell to the pool, which may start a process for it; the process does not import the script."""
    with without_main(cell.experiment.own, cell.engine):
        return pool.submit(_work, cell)


def _result(cell: Cell, future: Future[Outcome]) -> Outcome:
    return future.result()


def longest_first(
    cells: Sequence[Cell],
    slots: Callable[[], int],
    submit: Callable[[Cell], Future[Outcome]],
    *,
    outcome: Callable[[Cell, Future[Outcome]], Outcome] = _result,
    look: float | None = None,
) -> list[Outcome]:
    """Keep as many cells running as there are slots, so that the last ones to end are short ones.

    Args:
        cells: the runs.
        slots: gives the number that may run now.
        submit: starts one.
        outcome: gets the outcome of one that is done.
        look: seconds after which slots are counted again although no run ended; None: never.

    Returns:
        What became of every cell, in order.
    """
    outcomes: dict[int, Outcome] = {}
    running: dict[Future[Outcome], int] = {}
    durations = Durations()
    while len(outcomes) < len(cells):
        for _ in range(min(slots(), len(cells) - len(outcomes)) - len(running)):
            waiting = set(range(len(cells))) - outcomes.keys() - set(running.values())
            chosen = durations.next_of({i: cells[i] for i in sorted(waiting)})
            running[submit(cells[chosen])] = chosen
        for future in wait(running, timeout=look, return_when=FIRST_COMPLETED).done:
            index = running.pop(future)
            outcomes[index] = result = outcome(cells[index], future)
            if not isinstance(result, str):
                durations.learn(cells[index], result)
    return [outcomes[i] for i in range(len(cells))]


class Durations:
    """How long a round takes, learnt from the runs that are done: other seeds of a method take as long."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, ...], float] = {}
        self._begun: set[tuple[str, ...]] = set()

    def next_of(self, cells: Mapping[int, Cell]) -> int:
        """Choose the cell to run next: one of a kind that has not run yet, else the longest."""
        chosen = max(cells, key=lambda i: self._expected(cells[i]))
        self._begun.add(_kind(cells[chosen]))
        return chosen

    def _expected(self, cell: Cell) -> tuple[bool, float]:
        """Tell whether the kind is new, and the expected seconds; infinite until its first run is done."""
        kind = _kind(cell)
        return kind not in self._begun, self._seconds.get(kind, math.inf) * cell.experiment.rounds

    def learn(self, cell: Cell, summary: Summary) -> None:
        """Remember a run that is done."""
        self._seconds[_kind(cell)] = summary["seconds"] / max(summary["rounds"], 1)


def _kind(cell: Cell) -> tuple[str, ...]:
    """Name the kind of a run: runs of a kind take equally long per round."""
    return cell.label, cell.experiment.dataset, cell.experiment.model


_events: Any = None


def _begin(events: Any) -> None:
    global _events
    _events = events
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the study's to answer
    end_with_parent()
    tune_process()


def _work(cell: Cell) -> Outcome:
    return attempt(cell, _events.put)


def _teller(cell: Cell, progress: Callable[[Event], None]) -> Callable[[Event], None]:
    """Report events under the name of their run."""
    return lambda line: progress({**line, "run": cell.path.name})


def _stays_here(cells: Sequence[Cell], jobs_given: bool) -> str | None:
    reasons = (stays_here({**cell.experiment.own, "engine": cell.engine}, jobs_given) for cell in cells)
    return next((why for why in reasons if why), None)


def _listen(events: Any, progress: Callable[[Event], None]) -> None:
    while (line := events.get()) is not None:
        progress(line)
