"""The round loop's backend on Flower: one message per site and round, quorum, time limits, missing sites.

All jobs that concern a site travel in one message (an exchange costs seconds, whatever it carries); the
server tests the global model on its own test set while the sites are at work.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from flwr.app import RecordDict

from fedld.engine.backends.flower.orders import Orders, SiteError, same_structure
from fedld.engine.backends.flower.secure_server import SecureServer
from fedld.engine.backends.flower.sites import Patience, Sites, exchange
from fedld.engine.backends.flower.wire import SecureRequest, listed
from fedld.engine.backends.inprocess import InProcess
from fedld.engine.jobs import (
    CandidateJob,
    ClientJob,
    ClientResult,
    Done,
    Failure,
    Job,
    JobResult,
    LossJob,
    Personal,
    PersonalJob,
    Prepared,
    PrepareJob,
    RoundJob,
    Setup,
    SharedMemory,
    SiteTest,
    SiteTestJob,
    TestJob,
    Trained,
    TrainJob,
)
from fedld.errors import FedLDError, printable
from fedld.layout import Tree
from fedld.records.ledger import Ledger
from fedld.records.schema import Event
from fedld.tasks.measure import EMPTY
from fedld.transforms import CombinedTotal, SummedEntry, Total

DEFAULT_TIMEOUT = 3600.0
PAUSE = 2.0
SERVER = ""
"""Who does what the server does itself; no site has this name."""
T = TypeVar("T")
Kept = Callable[[], set[tuple[str, int]]]


@dataclass
class _Request:
    """One call of `run`: each site's jobs under their places in the list, and what has been found so far."""

    jobs: Sequence[Job]
    common: Tree
    limit: float
    places: dict[str, list[tuple[int, ClientJob]]]
    found: dict[tuple[int, str], Any] = field(default_factory=dict)


class FlowerBackend:
    """Runs the jobs of a round at the sites."""

    def __init__(
        self,
        setup: Setup,
        memory: SharedMemory,
        sites: Sites,
        run: str,
        kept: Kept,
        ledger: Ledger,
        tell: Callable[[Event], None],
        folder: Path,
    ) -> None:
        self.setup, self.sites, self.kept, self.ledger, self.tell = setup, sites, kept, ledger, tell
        self.tried = not setup.experiment.dry_run
        test_images = {site.site: site.test for site in sites.fixed or ()}
        self.orders, self.here = Orders(setup, memory, run, test_images), InProcess(setup, memory)
        hidden = setup.transforms.sums_only is not None
        self.secure = SecureServer(setup, sites, run, folder / "secure", ledger) if hidden else None

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[JobResult | Failure]:
        """Do all jobs; a job whose site is missing is a failure, or a measure that is not known."""
        limit = DEFAULT_TIMEOUT if deadline is None else deadline - time.monotonic()
        request = _Request(jobs, common, limit, self._places(jobs))
        if self.secure is not None:
            self.secure.begin(jobs)
        if not self.tried:
            self._dry_run(request)
        self._ask(request, list(request.places), limit, lambda: self._test(request))
        self._wait_for_quorum(request)
        results = [_result(request, k, job) for k, job in enumerate(jobs)]
        same_structure(results, may_be_empty=self.setup.method.second_moments)
        if done is not None:
            for job, result in zip(jobs, results, strict=True):
                done(job, result)
        return results

    def total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> Total:
        """Open the secure sum of what the sites keep of the last jobs."""
        assert self.secure is not None
        return self.secure.total(messages, weights, entries)

    def combine(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> CombinedTotal:
        """Open the Gram matrix of the updates that the sites keep, and their secure sum with coefficients."""
        assert self.secure is not None
        return self.secure.combine(messages, weights, entries)

    def close(self) -> None:
        """The grid belongs to Flower."""

    def _request(self, request: _Request, sites: Iterable[str]) -> dict[str, SecureRequest]:
        """A request to keep results for a sum, for each of the sites that have a part in the round.

        The sum is over all sites that are there, also if a few of them are asked late, or again.
        """
        if self.secure is None:
            return {}
        asked = [site for site in sites if any(isinstance(j, RoundJob) for j in _jobs(request, site))]
        here = [site for site in request.places if site in self.sites.present]
        among = {site for site in here if any(isinstance(j, RoundJob) for j in _jobs(request, site))}
        among |= self.secure.holders
        trains = any(isinstance(job, TrainJob) for site in asked for job in _jobs(request, site))
        gram = trains and self.setup.experiment.secure == "gram"
        computation: Literal["sum", "gram"] = "gram" if gram else "sum"
        return dict.fromkeys(asked, self.secure.request(sorted(among), computation)) if asked else {}

    def _places(self, jobs: Sequence[Job]) -> dict[str, list[tuple[int, ClientJob]]]:
        """Jobs by site, a loss job for several sites divided; who has no test images is asked for none."""
        tested = {site.site for site in self.sites.fixed or () if site.test}
        places: dict[str, list[tuple[int, ClientJob]]] = defaultdict(list)
        for k, job in enumerate(jobs):
            if isinstance(job, LossJob):
                for site in job.clients:
                    places[site].append((k, replace(job, clients=(site,))))
            elif isinstance(job, SiteTestJob) and job.incoming.client not in tested:
                continue
            elif not isinstance(job, TestJob):
                places[job.incoming.client].append((k, job))
        return dict(places)

    def _test(self, request: _Request) -> None:
        """The global test set is the server's: its jobs are done here, while the sites are at work."""
        mine = [k for k, job in enumerate(request.jobs) if isinstance(job, TestJob)]
        for k, result in zip(
            mine, self.here.run([request.jobs[k] for k in mine], request.common), strict=True
        ):
            request.found[k, SERVER] = result

    def _dry_run(self, request: _Request) -> None:
        """Let every site train two steps on a few images before anything is spent on a round."""
        self.tried = True
        first = {site: request.jobs[k] for k, site in _training(request.jobs).items()}
        nodes = {site: node for site, node in self.sites.present.items() if site in first}
        secure = self._request(request, nodes)
        contents = {
            node: self.orders.write(
                [cast(ClientJob, first[site])],
                request.common,
                set(),
                dry_run=True,
                secure=secure.get(site),
            )
            for site, node in nodes.items()
        }
        replies = exchange(self.sites.grid, contents, "train", Patience(request.limit), self.orders.largest)
        failed: dict[str, str] = {}
        for site in first:
            reply = replies[nodes[site]] if site in nodes else self._absent(site)
            found = reply if isinstance(reply, Failure) else self._read(self.orders.dry_run_of, reply)
            if isinstance(found, Failure):
                failed[site] = found.error
            else:
                facts = {"seconds": found.seconds, "memory": found.memory}
                self.tell({"event": "dry_run", "client": site, **facts})
        for name, why in failed.items():
            self.tell({"event": "dry_run", "client": name, "why": why})
        needed = min(self.setup.experiment.quorum(len(first)), len(first))
        if len(first) - len(failed) < needed:
            why = "; ".join(f"{name}: {text}" for name, text in failed.items())
            raise FedLDError(
                f"{len(first) - len(failed)} of {len(first)} sites can train, {needed} are needed ({why})"
            )

    def _read(self, read: Callable[[RecordDict], T], reply: RecordDict) -> T | Failure:
        """What is read of a reply; whatever goes wrong with it is its site's failure."""
        try:
            return read(reply)
        except SiteError as error:
            return Failure(printable(str(error)), "", "failed")
        except Exception as error:
            text = str(error) if isinstance(error, FedLDError) else f"its reply is malformed: {error!r}"
            return Failure(printable(text), "", "malformed")

    def _ask(
        self, request: _Request, sites: list[str], limit: float, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Send sites their orders and file the outcomes, or the reason why there is none."""
        self.sites.refresh()
        present, kept = self.sites.present, self.kept()
        nodes = {site: present[site] for site in sites if site in present}
        secure = self._request(request, nodes)
        contents = {
            node: self.orders.write(
                _jobs(request, site),
                request.common,
                {round_ for owner, round_ in kept if owner == site},
                secure=secure.get(site),
            )
            for site, node in nodes.items()
        }
        experiment, training = self.setup.experiment, _training(request.jobs)
        expected = len(training) or len(sites)  # grace is also for those who only measure
        quorum = min(experiment.quorum(expected), expected)
        patience = Patience(limit, quorum, experiment.grace)
        replies = exchange(self.sites.grid, contents, "train", patience, self.orders.largest, meanwhile)
        for site in sites:
            reply = replies[nodes[site]] if site in nodes else self._absent(site)
            sent = contents.get(nodes.get(site, 0))
            self._file(request, site, sent, reply)
            self._enter(request, site, sent, reply)

    def _file(
        self, request: _Request, site: str, sent: RecordDict | None, reply: RecordDict | Failure
    ) -> None:
        places = request.places[site]
        found: Any = reply
        if not isinstance(reply, Failure):
            assert sent is not None
            found = self._read(partial(self._results, site, _jobs(request, site), sent), reply)
        results = [found] * len(places) if isinstance(found, Failure) else found
        for (k, _), result in zip(places, results, strict=True):
            request.found[k, site] = result

    def _results(
        self, site: str, jobs: list[ClientJob], sent: RecordDict, reply: RecordDict
    ) -> list[ClientResult]:
        """The results of a site's jobs; the first message of a secure sum is kept."""
        results = self.orders.read(jobs, reply)
        if self.secure is not None:
            self.secure.keep(site, jobs, sent, reply)
        return results

    def _enter(
        self, request: _Request, site: str, sent: RecordDict | None, reply: RecordDict | Failure
    ) -> None:
        """An order and its outcome, in the ledger."""
        jobs = _jobs(request, site)
        outcome = next((found for (k, _) in request.places[site] if (found := request.found[k, site])), None)
        facts: dict[str, Any] = {"sent": listed(sent) if sent else {}}
        if isinstance(outcome, Failure):
            facts |= {"missing": outcome.reason, "why": outcome.error}
        if not isinstance(reply, Failure):
            facts["received"] = listed(reply)
        self.ledger.append(
            "order",
            run=self.orders.run,
            site=site,
            rounds=sorted({job.round for job in jobs if isinstance(job, RoundJob)}),
            jobs=dict(Counter(job.kind for job in jobs)),
            **facts,
        )

    def _absent(self, site: str) -> Failure:
        refused = self.sites.refused.get(site)
        if refused:
            return Failure(f"the site was refused: {refused}", "", "refused")
        return Failure("the site is not connected", "", "away")

    def _wait_for_quorum(self, request: _Request) -> None:
        """Below quorum: wait for missing sites to come back and ask them again, for a set time."""
        training = _training(request.jobs)
        needed = min(self.setup.experiment.quorum(len(training)), len(training))
        end = time.monotonic() + self.setup.experiment.wait_for_clients
        while time.monotonic() < end and _usable(request, training) < needed:
            time.sleep(PAUSE)
            self.sites.refresh()
            failed = [site for k, site in training.items() if isinstance(request.found[k, site], Failure)]
            back = [site for site in failed if site in self.sites.present]
            if back:
                said = {key: one for key, one in request.found.items() if _site_said(one)}
                self._ask(request, back, min(request.limit, max(1.0, end - time.monotonic())))
                # A site's own reason is better than that it did not answer again in time.
                silent = {key for key, one in request.found.items() if isinstance(one, Failure)}
                request.found.update({key: one for key, one in said.items() if key in silent})


def _training(jobs: Sequence[Job]) -> dict[int, str]:
    """Clients that train or prepare to, by their job's place."""
    work = PrepareJob | TrainJob
    return {k: job.incoming.client for k, job in enumerate(jobs) if isinstance(job, work)}


def _site_said(result: Any) -> bool:
    """Whether a result is a failure in a site's own words."""
    return isinstance(result, Failure) and result.reason == "failed"


def _jobs(request: _Request, site: str) -> list[ClientJob]:
    return [job for _, job in request.places[site]]


def _usable(request: _Request, training: dict[int, str]) -> int:
    results = (request.found[k, site] for k, site in training.items())
    return sum(isinstance(result, Prepared | Trained) and result.finite for result in results)


def _result(request: _Request, k: int, job: Job) -> JobResult | Failure:
    """A job's result; where a site is missing, its losses and measures are not known."""
    match job:
        case TestJob():
            result: JobResult | Failure = request.found[k, SERVER]
        case LossJob():
            sums = (request.found[k, site] for site in job.clients)
            result = [EMPTY if isinstance(one, Failure) else one for one in sums]
        case PersonalJob():
            result = request.found[k, job.incoming.client]
            result = Personal(None, None) if isinstance(result, Failure) else result
        case SiteTestJob():
            result = request.found.get((k, job.incoming.client))
            result = result if isinstance(result, SiteTest) else SiteTest({})
        case PrepareJob() | TrainJob() | CandidateJob():
            result = request.found[k, job.incoming.client]
    return result
