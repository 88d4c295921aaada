"""Orders to sites and what comes back: a site's jobs in one message, its reply checked before it counts."""

from collections import Counter
from collections.abc import Sequence

import tomli_w
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedld import __version__
from fedld.engine.flower.site import site_settings
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
from fedld.engine.local import Failure
from fedld.engine.work import Arena, LossJob, Personal, PersonalJob, Result, Setup, Sums, Trained, TrainJob
from fedld.errors import FedLDError
from fedld.layout import Tree

SPARE = 16 << 20
"""Bytes that a reply may have beyond eight models: room for any method's message."""

SiteJob = TrainJob | LossJob | PersonalJob


class Orders:
    """Writes orders and reads replies; an accepted update goes to its row of the arena."""

    def __init__(self, setup: Setup, arena: Arena, run: str) -> None:
        self.setup, self.arena, self.run = setup, arena, run
        self.settings = tomli_w.dumps(site_settings(setup.experiment))

    def write(self, site: int, jobs: Sequence[SiteJob], common: Tree, kept: set[int]) -> RecordDict:
        """One message with all that a site has to do; states of the rounds `kept` must stay there."""
        models: Tree = {}
        trees = {"weights": {"weights": self.arena.weights}, "common": common, "models": models}
        tasks: list[Task] = []
        for job in jobs:
            task = _task(job)
            if isinstance(job, LossJob) and job.slot is not None:
                task = task.model_copy(update={"model": len(models)})
                models[str(len(models))] = shared_part(self.setup.layout, self.arena.updates[job.slot])
            if job.incoming is not None and job.incoming.message:
                trees[f"message.{len(tasks)}"] = job.incoming.message
                task = task.model_copy(update={"message": len(tasks)})
            tasks.append(task)
        federation = self.setup.federation
        order = Order(
            version=__version__,
            run=self.run,
            site=site,
            settings=self.settings,
            classes=list(federation.classes),
            mean=list(federation.mean),
            std=list(federation.std),
            kept=sorted(kept | {task.state_round for task in tasks}),
            tasks=tasks,
        )
        return pack(order, **trees)

    def read(self, jobs: Sequence[SiteJob], reply: RecordDict | str) -> list[Trained | Sums | Personal]:
        """The results of a site's jobs; a reply that is not as it should be is an error that says why."""
        if isinstance(reply, str):
            raise FedLDError(reply)
        largest = 8 * 4 * self.setup.layout.size + SPARE
        if size(reply) > largest:
            raise FedLDError(f"its reply has {size(reply)} bytes, more than {largest}")
        answer = unpack(Answer, reply)
        if answer.error is not None:
            raise FedLDError(answer.error)
        if len(answer.outcomes) != len(jobs):
            raise FedLDError(f"it answered {len(answer.outcomes)} of {len(jobs)} tasks")
        return [self._accept(*pair, reply) for pair in zip(jobs, answer.outcomes, strict=True)]

    def _accept(self, job: SiteJob, outcome: Outcome, reply: RecordDict) -> Trained | Sums | Personal:
        match job:
            case TrainJob():
                return self._trained(job, outcome, reply)
            case PersonalJob():
                return Personal({}, outcome.own_accuracy)
            case LossJob():
                if outcome.before is None:
                    raise FedLDError("it sent no loss")
                return outcome.before

    def _trained(self, job: TrainJob, outcome: Outcome, reply: RecordDict) -> Trained:
        layout, row = self.setup.layout, self.arena.updates[job.slot]
        update, message = tree(reply, "update").get("update"), tree(reply, "message")
        length = layout.shared + layout.shared_end - layout.trainable
        if update is None or update.shape != (length,) or update.dtype != row.dtype:
            raise FedLDError(f"its update is not a float32 vector of {length} numbers")
        if {"steps", "train_loss"} - set(outcome.metrics):
            raise FedLDError("its metrics lack 'steps' or 'train_loss'")
        row.zero_()
        set_shared(layout, row, update)
        metrics = {key: float("nan") if value is None else value for key, value in outcome.metrics.items()}
        finite = all(map(_finite, (update, *message.values(), torch.tensor(metrics["steps"]))))
        facts = (outcome.before, outcome.after, finite, outcome.seconds)
        return Trained(message, outcome.kept, metrics, *facts)


def same_structure(results: list[Result | Failure]) -> None:
    """Messages of one round are alike; one that is not like most others becomes a failure."""
    kinds = {
        k: tuple(sorted((key, tuple(t.shape), str(t.dtype)) for key, t in result.message.items()))
        for k, result in enumerate(results)
        if isinstance(result, Trained)
    }
    usual = Counter(kinds.values()).most_common(1)
    for k, kind in kinds.items():
        if kind != usual[0][0]:
            results[k] = Failure("its message has another structure than the other sites'", "")


def _task(job: SiteJob) -> Task:
    """A job as a site gets it. Only its owner has a client's state: other sites see the shared part."""
    match job:
        case TrainJob():
            return Task(kind="train", round=job.round, state_round=job.incoming.state_round)
        case PersonalJob():
            return Task(kind="personal", state_round=job.incoming.state_round)
        case LossJob():
            return Task(kind="loss")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
