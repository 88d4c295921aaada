"""Grids of runs on a Dask cluster: a task is a whole run, and its files go to a folder that all machines see.

The study's folder is shared, so a run continues after its worker died, from its last checkpoint on
another one. What comes back through the scheduler is a run's summary; tables are made from the files, as they
are here.

`session.json` in the study's folder names the process that asked for the runs. A worker that finds another
session there, or none, stops after the round in hand.
"""

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from fedld.config.own import check_portable
from fedld.engine.backends.processes import tune_process
from fedld.engine.hardware import changed, environment
from fedld.errors import FedLDError, Interrupted
from fedld.records.reader import read_object
from fedld.records.schema import Environment, Event
from fedld.records.writer import Locked, dump, write_atomically
from fedld.study.grid import STOPPED, Cell, Outcome, attempt, longest_first

NEEDS_DASK = "a study on a cluster needs Dask: pip install 'fedld[cluster]'"
SESSION = "session.json"
CONNECT_SECONDS = 20
LOOK_SECONDS = 2.0  # how often the number of workers, and a folder that is still in use, is looked at


class ClusterError(FedLDError):
    """A worker that cannot run this study."""


@dataclass(frozen=True)
class Cluster:
    """Where a study runs: a Dask client, and the study's folder on every machine."""

    client: Any
    folder: Path


@dataclass(frozen=True)
class Session:
    """What a worker checks before a run.

    Args:
        file: the file that names the session, in the shared folder.
        name: name of the session, drawn at its beginning.
        version: fedld's version where the study was started.
        environment: machine and libraries there.
    """

    file: Path
    name: str
    version: str
    environment: Environment

    def open(self) -> bool:
        """Tell whether the session's file is there and names this session."""
        content = read_object(self.file)
        return content is not None and content.get("session") == self.name


def connect(address: str) -> Any:
    """Connect to a Dask scheduler; TLS certificates are those of Dask's own configuration.

    Args:
        address: `tcp://HOST:PORT` or `tls://HOST:PORT`.

    Returns:
        The Dask client.

    Raises:
        FedLDError: Dask is not installed, the address has another form, or no scheduler answers.
    """
    if not address.startswith(("tcp://", "tls://")):
        raise FedLDError(f"scheduler is tcp://HOST:PORT or tls://HOST:PORT, not '{address}'")
    try:
        from distributed import Client
    except ImportError:
        raise FedLDError(NEEDS_DASK) from None
    try:
        make: Callable[..., Any] = Client
        return make(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError) as error:  # TypeError: tls:// without certificates
        raise FedLDError(f"no Dask scheduler can be used at '{address}': {str(error)[:200]}") from None


def check_client(value: Any) -> Any:
    """Check that a value is a Dask client that can be waited for.

    Raises:
        FedLDError: it is something else, or an asynchronous client.
    """
    try:
        from distributed import Client
    except ImportError:
        raise FedLDError(NEEDS_DASK) from None
    if not isinstance(value, Client) or value.asynchronous:
        raise FedLDError(f"executor is a Dask client (distributed.Client), not {value!r:.80}")
    return value


def run_on_cluster(
    cells: Sequence[Cell], cluster: Cluster, jobs: int | None, progress: Callable[[Event], None]
) -> list[Outcome]:
    """Run all cells on the workers of a cluster, at most `jobs` at a time.

    Args:
        cells: the runs; their folders are in the cluster's folder.
        cluster: client and shared folder.
        jobs: limit of runs at a time; default: one for every worker process.
        progress: gets the events of all runs.

    Returns:
        What became of every cell, in order.

    Raises:
        FedLDError: a worker cannot run the study, or the scheduler is lost.
        Interrupted: the user stopped the study.
    """
    _check_cells(cells, jobs)
    placed = [replace(cell, path=cell.path.absolute()) for cell in cells]
    with _session(cluster.folder.absolute()) as session, _events(cluster.client, session, progress):
        executor = cluster.client.get_executor(pure=False)

        def slots() -> int:
            workers = len(cluster.client.nthreads())
            return max(1, min(workers, jobs or workers))

        def submit(cell: Cell) -> Future[Outcome]:
            return executor.submit(_work, cell, session)  # type: ignore[no-any-return]

        def outcome(cell: Cell, future: Future[Outcome]) -> Outcome:
            return _outcome(cell, future, progress)

        try:
            if not cluster.client.nthreads():
                warnings.warn("the scheduler has no workers yet: the study waits for them", stacklevel=2)
            return longest_first(placed, slots, submit, outcome=outcome, look=LOOK_SECONDS)
        except KeyboardInterrupt:
            raise Interrupted(STOPPED) from None
        except (CancelledError, OSError):
            raise FedLDError("the scheduler is lost; continue with the same command and --resume") from None
        finally:
            executor.shutdown(wait=False)


def end_session(folder: Path) -> None:
    """End the session of a study's folder: workers that still write there stop after the round in hand."""
    (folder / SESSION).unlink(missing_ok=True)


def _check_cells(cells: Sequence[Cell], jobs: int | None) -> None:
    if jobs == 0:
        raise FedLDError("jobs=0 keeps the runs in this process: leave it out for a cluster")
    for cell in cells:
        if cell.experiment.workers != 0:
            raise FedLDError("a run on a cluster has no processes of its own: leave 'workers' out")
        if cell.experiment.own:
            check_portable(cell.experiment.own)


@contextmanager
def _session(folder: Path) -> Iterator[Session]:
    from fedld import __version__

    session = Session(folder / SESSION, secrets.token_hex(16), __version__, environment())
    write_atomically(session.file, dump({"session": session.name}).encode())
    try:
        yield session
    finally:
        end_session(folder)


@contextmanager
def _events(client: Any, session: Session, progress: Callable[[Event], None]) -> Iterator[None]:
    """Show what workers report while the study runs."""

    def take(event: tuple[float, Event]) -> None:
        progress(event[1])

    client.subscribe_topic(session.name, take)
    try:
        yield
    finally:
        client.unsubscribe_topic(session.name)


def _outcome(cell: Cell, future: Future[Outcome], progress: Callable[[Event], None]) -> Outcome:
    """Get a run's outcome; a run that ended several workers has failed, the others go on."""
    from distributed import KilledWorker

    try:
        return future.result()
    except KilledWorker:
        why = "its workers died several times in a row; its last checkpoint is kept for --resume"
        progress({"event": "failed", "run": cell.path.name, "why": why})
        return why
    except ImportError as error:
        raise FedLDError(f"a worker cannot import what the study needs: {error}") from None


_one_run = threading.Lock()
"""A worker process runs one run at a time, however many threads it has: torch's settings are its own."""


def _work(cell: Cell, session: Session) -> Outcome:
    """Run a cell in a worker process."""
    from distributed import get_worker

    worker = get_worker()

    def report(line: Event) -> None:
        worker.log_event(session.name, line)
        if not session.open():
            raise KeyboardInterrupt  # the study was stopped; the loop keeps what is finished

    with _one_run, threadpool_limits(1):
        _check_worker(session, worker.address, report)
        threads = torch.get_num_threads()
        tune_process()
        try:
            return _when_free(cell, report)
        except KeyboardInterrupt:
            raise Interrupted(STOPPED) from None
        finally:
            torch.set_num_threads(threads)


def _check_worker(session: Session, address: str, report: Callable[[Event], None]) -> None:
    from fedld import __version__

    if not session.open():
        folder = session.file.parent
        raise ClusterError(f"worker {address} does not see the study's folder '{folder}': use a shared one")
    if __version__ != session.version:
        raise ClusterError(f"worker {address} has fedld {__version__}, the study {session.version}")
    if changed(session.environment, here := environment()):
        kind = f"{here['processor']}, {here['instructions']}, torch {here['torch']}"
        report({"event": "note", "text": f"a worker differs from this machine ({kind}): bits may differ"})


def _when_free(cell: Cell, report: Callable[[Event], None]) -> Outcome:
    """Run a cell as soon as no other process writes to its folder: a lost worker may still be at work."""
    while True:
        try:
            return attempt(cell, report, through=(Locked,))
        except Locked:
            report({"event": "note", "text": f"another process is writing to '{cell.path}': waiting for it"})
            time.sleep(LOOK_SECONDS)
