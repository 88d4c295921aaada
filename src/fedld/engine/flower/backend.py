"""The round loop's backend on Flower: one message a site and round, quorum, time limits, missing sites.

All jobs that concern a site travel in one message (an exchange costs seconds, whatever it carries); the
server tests the global model on its own test set while the sites are at work.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import RecordDict

from fedld.engine.flower.orders import Orders, SiteJob, same_structure
from fedld.engine.flower.sites import Sites, exchange
from fedld.engine.local import Done, Failure, InProcess
from fedld.engine.work import (
    Arena,
    Job,
    LossJob,
    Personal,
    PersonalJob,
    Result,
    Setup,
    Sums,
    TestJob,
    Trained,
    TrainJob,
)
from fedld.errors import FedLDError
from fedld.layout import Tree

DEFAULT_TIMEOUT = 3600.0
PAUSE = 2.0
UNKNOWN = Sums(float("nan"), float("nan"), 0, 0)
Kept = Callable[[], set[tuple[int, int]]]


@dataclass
class _Turn:
    """One call of `run`: each site's jobs under their places in the list, and what has been found so far."""

    jobs: Sequence[Job]
    common: Tree
    limit: float
    places: dict[int, list[tuple[int, SiteJob]]]
    found: dict[tuple[int, int], Any] = field(default_factory=dict)


class FlowerBackend:
    """Runs the jobs of a round at the sites."""

    def __init__(self, setup: Setup, arena: Arena, sites: Sites, run: str, kept: Kept) -> None:
        self.setup, self.sites, self.kept = setup, sites, kept
        self.names = [client.name for client in setup.federation.clients]
        self.orders, self.local = Orders(setup, arena, run), InProcess(setup, arena)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[Result | Failure]:
        """Do all jobs; a job whose site is missing is a failure, or a measure that is not known."""
        limit = DEFAULT_TIMEOUT if deadline is None else deadline - time.monotonic()
        turn = _Turn(jobs, common, limit, _places(jobs))
        self._ask(turn, list(turn.places), limit, lambda: self._test(turn))
        self._wait_for_quorum(turn)
        results = [_result(turn, k, job) for k, job in enumerate(jobs)]
        same_structure(results)
        if done is not None:
            for job, result in zip(jobs, results, strict=True):
                done(job, result)
        return results

    def close(self) -> None:
        """The grid belongs to Flower."""

    def _test(self, turn: _Turn) -> None:
        """The global test set is the server's: its jobs are done here, while the sites are at work."""
        mine = [k for k, job in enumerate(turn.jobs) if isinstance(job, TestJob)]
        for k, result in zip(mine, self.local.run([turn.jobs[k] for k in mine], turn.common), strict=True):
            turn.found[k, -1] = result

    def _ask(
        self, turn: _Turn, sites: list[int], limit: float, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Send sites their orders and file the outcomes, or the reason why there is none."""
        self.sites.refresh()
        present, kept = self.sites.present, self.kept()
        nodes = {site: present[self.names[site]] for site in sites if self.names[site] in present}
        contents = {
            node: self.orders.write(site, _jobs(turn, site), turn.common, {r for i, r in kept if i == site})
            for site, node in nodes.items()
        }
        replies = exchange(self.sites.grid, contents, "train", limit, meanwhile)
        for site in sites:
            self._file(turn, site, replies[nodes[site]] if site in nodes else self._absent(site))

    def _file(self, turn: _Turn, site: int, reply: RecordDict | str) -> None:
        places = turn.places[site]
        try:
            results: list[Any] = list(self.orders.read(_jobs(turn, site), reply))
        except FedLDError as error:
            results = [Failure(str(error), "")] * len(places)
        for (k, _), result in zip(places, results, strict=True):
            turn.found[k, site] = result

    def _absent(self, site: int) -> str:
        refused = self.sites.refused.get(self.names[site])
        return f"the site was refused: {refused}" if refused else "the site is not connected"

    def _wait_for_quorum(self, turn: _Turn) -> None:
        """Below quorum: wait for missing sites to come back and ask them again, for a set time."""
        training = {k: job.incoming.client for k, job in enumerate(turn.jobs) if isinstance(job, TrainJob)}
        needed = min(self.setup.experiment.min_clients, len(training))
        end = time.monotonic() + self.setup.experiment.wait_for_clients
        while time.monotonic() < end and _usable(turn, training) < needed:
            time.sleep(PAUSE)
            self.sites.refresh()
            failed = [i for k, i in training.items() if isinstance(turn.found[k, i], Failure)]
            back = [i for i in failed if self.names[i] in self.sites.present]
            if back:
                self._ask(turn, back, min(turn.limit, max(1.0, end - time.monotonic())))


def _places(jobs: Sequence[Job]) -> dict[int, list[tuple[int, SiteJob]]]:
    """Jobs by site, a loss job for several sites divided among them."""
    places: dict[int, list[tuple[int, SiteJob]]] = defaultdict(list)
    for k, job in enumerate(jobs):
        if isinstance(job, LossJob):
            for site in job.clients:
                places[site].append((k, replace(job, clients=(site,))))
        elif not isinstance(job, TestJob):
            places[job.incoming.client].append((k, job))
    return dict(places)


def _jobs(turn: _Turn, site: int) -> list[SiteJob]:
    return [job for _, job in turn.places[site]]


def _usable(turn: _Turn, training: dict[int, int]) -> int:
    results = (turn.found[k, i] for k, i in training.items())
    return sum(isinstance(result, Trained) and result.finite for result in results)


def _result(turn: _Turn, k: int, job: Job) -> Result | Failure:
    """A job's result; where a site is missing, its losses and measures are not known."""
    match job:
        case TestJob():
            result: Result | Failure = turn.found[k, -1]
        case LossJob():
            sums = (turn.found[k, site] for site in job.clients)
            result = [UNKNOWN if isinstance(one, Failure) else one for one in sums]
        case PersonalJob():
            result = turn.found[k, job.incoming.client]
            result = Personal({}, None) if isinstance(result, Failure) else result
        case TrainJob():
            result = turn.found[k, job.incoming.client]
    return result
