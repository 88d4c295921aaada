"""The round loop's backend on Flower: one message a site and round, quorum, time limits, missing sites.

All jobs that concern a site travel in one message (an exchange costs seconds, whatever it carries); the
server tests the global model on its own test set while the sites are at work.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tomli_w
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedld import __version__
from fedld.engine.flower.site import site_settings
from fedld.engine.flower.sites import Sites, exchange
from fedld.engine.flower.wire import (
    Answer,
    Order,
    Outcome,
    Task,
    pack,
    set_shared,
    shared_part,
    size,
    tree,
    unpack,
)
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
SPARE = 16 << 20
"""Bytes that a reply may have beyond eight models: room for any method's message."""

Kept = Callable[[], set[tuple[int, int]]]
Place = tuple[int, Job]


class FlowerBackend:
    """Runs the jobs of a round at the sites."""

    def __init__(self, setup: Setup, arena: Arena, sites: Sites, run: str, kept: Kept) -> None:
        self.setup, self.arena, self.sites, self.run_id, self.kept = setup, arena, sites, run, kept
        self.names = [client.name for client in setup.federation.clients]
        self.settings = tomli_w.dumps(site_settings(setup.experiment))
        self.local = InProcess(setup, arena)

    def run(
        self, jobs: Sequence[Job], common: Tree, done: Done | None = None, deadline: float | None = None
    ) -> list[Result | Failure]:
        """Do all jobs; a job whose site is missing is a failure, or a measure that is not known."""
        limit = DEFAULT_TIMEOUT if deadline is None else deadline - time.monotonic()
        places = self._places(jobs)
        found: dict[tuple[int, int], Any] = {}
        tests = [(k, job) for k, job in enumerate(jobs) if isinstance(job, TestJob)]

        def test() -> None:
            for (k, _), result in zip(tests, self.local.run([job for _, job in tests], common), strict=True):
                found[k, -1] = result

        self._ask(places, common, limit, found, test)
        self._wait_for_quorum(jobs, places, common, limit, found)
        results = [self._result(k, job, found) for k, job in enumerate(jobs)]
        _same_structure(jobs, results)
        if done is not None:
            for job, result in zip(jobs, results, strict=True):
                done(job, result)
        return results

    def close(self) -> None:
        """The grid belongs to Flower."""

    def _places(self, jobs: Sequence[Job]) -> dict[int, list[Place]]:
        """Jobs by site, a loss job for several sites divided among them."""
        places: dict[int, list[Place]] = defaultdict(list)
        for k, job in enumerate(jobs):
            if isinstance(job, LossJob):
                for site in job.clients:
                    places[site].append((k, replace(job, clients=(site,))))
            elif not isinstance(job, TestJob):
                places[job.incoming.client].append((k, job))
        return dict(places)

    def _ask(
        self,
        places: dict[int, list[Place]],
        common: Tree,
        limit: float,
        found: dict[tuple[int, int], Any],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Send the sites their orders and file the outcomes, or the reason why there is none."""
        self.sites.refresh()
        nodes = {site: self.sites.present.get(self.names[site]) for site in places}
        kept = self.kept()
        contents = {
            node: self._order(site, places[site], common, kept)
            for site, node in nodes.items()
            if node is not None
        }
        replies = exchange(self.sites.grid, contents, "train", limit, meanwhile)
        for site, node in nodes.items():
            reply: RecordDict | str = self._absent(site) if node is None else replies[node]
            try:
                self._file(site, places[site], reply, found)
            except FedLDError as error:
                for k, _ in places[site]:
                    found[k, site] = Failure(str(error), "")

    def _absent(self, site: int) -> str:
        refused = self.sites.refused.get(self.names[site])
        return f"the site was refused: {refused}" if refused else "the site is not connected"

    def _order(self, site: int, places: list[Place], common: Tree, kept: set[tuple[int, int]]) -> RecordDict:
        """One message with all that a site has to do."""
        trees: dict[str, Tree] = {"weights": {"weights": self.arena.weights}, "common": common, "models": {}}
        slots: dict[int, int] = {}
        tasks: list[Task] = []
        for _, job in places:
            task = _task(job)
            if isinstance(job, LossJob) and job.slot is not None:
                slot = slots.setdefault(job.slot, len(slots))
                trees["models"][str(slot)] = shared_part(self.setup.layout, self.arena.updates[job.slot])
                task = task.model_copy(update={"model": slot})
            incoming = job.incoming if not isinstance(job, TestJob) else None
            if incoming is not None and incoming.message:
                task = task.model_copy(update={"message": len(tasks)})
                trees[f"message.{len(tasks)}"] = incoming.message
            tasks.append(task)
        federation = self.setup.federation
        rounds = {r for i, r in kept if i == site} | {task.state_round for task in tasks}
        order = Order(
            version=__version__,
            run=self.run_id,
            site=site,
            settings=self.settings,
            classes=list(federation.classes),
            mean=list(federation.mean),
            std=list(federation.std),
            kept=sorted(rounds),
            tasks=tasks,
        )
        return pack(order, **trees)

    def _file(
        self, site: int, places: list[Place], reply: RecordDict | str, found: dict[tuple[int, int], Any]
    ) -> None:
        """Check a site's reply and put its outcomes where the loop looks for them."""
        if isinstance(reply, str):
            raise FedLDError(reply)
        largest = 8 * 4 * self.setup.layout.size + SPARE
        if size(reply) > largest:
            raise FedLDError(f"its reply has {size(reply)} bytes, more than {largest}")
        answer = unpack(Answer, reply)
        if answer.error is not None:
            raise FedLDError(answer.error)
        if len(answer.outcomes) != len(places):
            raise FedLDError(f"it answered {len(answer.outcomes)} of {len(places)} tasks")
        for (k, job), outcome in zip(places, answer.outcomes, strict=True):
            found[k, site] = self._accept(job, outcome, reply)

    def _accept(self, job: Job, outcome: Outcome, reply: RecordDict) -> Trained | Sums | Personal:
        match job:
            case TrainJob():
                return self._trained(job, outcome, reply)
            case PersonalJob():
                return Personal({}, outcome.own_accuracy)
            case _:
                if outcome.before is None:
                    raise FedLDError("it sent no loss")
                return outcome.before

    def _trained(self, job: TrainJob, outcome: Outcome, reply: RecordDict) -> Trained:
        """The update to its row of the arena, if it has the model's size and type."""
        layout = self.setup.layout
        update, message = tree(reply, "update").get("update"), tree(reply, "message")
        length = layout.shared + layout.shared_end - layout.trainable
        if update is None or update.shape != (length,) or update.dtype != self.arena.updates.dtype:
            raise FedLDError(f"its update is not a float32 vector of {length} numbers")
        if {"steps", "train_loss"} - set(outcome.metrics):
            raise FedLDError("its metrics lack 'steps' or 'train_loss'")
        self.arena.updates[job.slot].zero_()
        set_shared(layout, self.arena.updates[job.slot], update)
        metrics = {key: float("nan") if value is None else value for key, value in outcome.metrics.items()}
        finite = all(map(_finite, (update, *message.values(), torch.tensor(metrics["steps"]))))
        return Trained(message, outcome.kept, metrics, outcome.before, outcome.after, finite, outcome.seconds)

    def _wait_for_quorum(
        self,
        jobs: Sequence[Job],
        places: dict[int, list[Place]],
        common: Tree,
        limit: float,
        found: dict[tuple[int, int], Any],
    ) -> None:
        """Below quorum: wait for missing sites to come back and ask them again, for a set time."""
        training = {k: job.incoming.client for k, job in enumerate(jobs) if isinstance(job, TrainJob)}
        needed = min(self.setup.experiment.min_clients, len(training))
        end = time.monotonic() + self.setup.experiment.wait_for_clients
        while time.monotonic() < end:
            usable = [k for k, i in training.items() if isinstance(r := found[k, i], Trained) and r.finite]
            if len(usable) >= needed:
                return
            time.sleep(2.0)
            self.sites.refresh()
            back = [
                i for k, i in training.items()
                if isinstance(found[k, i], Failure) and self.names[i] in self.sites.present
            ]  # fmt: skip
            if back:
                self._ask({i: places[i] for i in back}, common, min(limit, end - time.monotonic()), found)

    def _result(self, k: int, job: Job, found: dict[tuple[int, int], Any]) -> Result | Failure:
        """A job's result; where a site is missing, its losses and measures are not known."""
        unknown = Sums(float("nan"), float("nan"), 0, 0)
        match job:
            case TestJob():
                return found[k, -1]  # type: ignore[no-any-return]
            case LossJob():
                sums = (found[k, site] for site in job.clients)
                return [unknown if isinstance(one, Failure) else one for one in sums]
            case PersonalJob():
                result = found[k, job.incoming.client]
                return Personal({}, None) if isinstance(result, Failure) else result
            case TrainJob():
                return found[k, job.incoming.client]  # type: ignore[no-any-return]


def _task(job: Job) -> Task:
    """A job as a site gets it. Only its owner has a client's state: others see its shared part (`model`)."""
    match job:
        case TrainJob():
            return Task(kind="train", round=job.round, state_round=job.incoming.state_round)
        case PersonalJob():
            return Task(kind="personal", state_round=job.incoming.state_round)
        case _:
            return Task(kind="loss")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _same_structure(jobs: Sequence[Job], results: list[Result | Failure]) -> None:
    """Messages of one round are alike; one that is not like most others is refused."""
    kinds = {
        k: tuple(sorted((key, tuple(t.shape), str(t.dtype)) for key, t in result.message.items()))
        for k, result in enumerate(results)
        if isinstance(result, Trained)
    }
    if not kinds:
        return
    usual = Counter(kinds.values()).most_common(1)[0][0]
    for k, kind in kinds.items():
        if kind != usual:
            results[k] = Failure("its message has another structure than the other sites'", "")
