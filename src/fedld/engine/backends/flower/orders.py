"""Orders to sites and what comes back: a site's jobs in one message, its reply checked before it counts."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tomli_w
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedld import __version__
from fedld.aggregation import Vote
from fedld.aggregation.measured import LARGEST_LOSS
from fedld.analysis.sites import SiteResult
from fedld.data import Client
from fedld.engine.backends.flower.site import site_settings
from fedld.engine.backends.flower.wire import (
    Answer,
    DryRun,
    Order,
    SecureRequest,
    pack,
    size,
    tree,
    unpack,
)
from fedld.engine.jobs import (
    CandidateJob,
    ClientJob,
    ClientResult,
    Failure,
    HeldVote,
    Incoming,
    JobResult,
    LossJob,
    Personal,
    PersonalJob,
    Prepared,
    PrepareJob,
    Setup,
    SharedMemory,
    SiteTest,
    SiteTestJob,
    Trained,
    TrainJob,
)
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.local.client import MEASURED
from fedld.methods.start import RIDGE
from fedld.methods.sum_bounds import centre_sums_problem, feature_sums_problem
from fedld.tasks import Tally
from fedld.transforms import BUFFERS, PARAMETERS

SPARE = 16 << 20
"""Bytes that a reply may have beyond eight models: room for any method's message."""


class SiteError(FedLDError):
    """What a site says went wrong there."""


class Orders:
    """Writes orders and reads replies; an accepted update goes to its row of the memory.

    `test_images` has the number of test images that each site described.
    """

    def __init__(self, setup: Setup, memory: SharedMemory, run: str, test_images: Mapping[str, int]) -> None:
        self.setup, self.memory, self.run, self.test_images = setup, memory, run, test_images
        self.summed = setup.transforms.sums_only is not None
        self.settings = tomli_w.dumps(site_settings(setup.experiment))
        self.largest = 8 * 4 * setup.layout.size + setup.method.message_bytes(setup.layout) + SPARE

    def write(
        self,
        jobs: Sequence[ClientJob],
        common: Tree,
        kept: set[int],
        *,
        dry_run: bool = False,
        secure: SecureRequest | None = None,
    ) -> RecordDict:
        """One message with all that a site has to do; states of the rounds `kept` must stay there."""
        models: Tree = {}
        trees = {"weights": {"weights": self.memory.weights}, "common": common, "models": models}
        sent: list[ClientJob] = []
        for k, job in enumerate(jobs):
            if job.incoming is not None and job.incoming.message:
                trees[f"message.{k}"] = job.incoming.message
            sent.append(self._sent(job, models))
        if any(isinstance(job, CandidateJob) for job in jobs):
            trees["candidates"] = self._candidates()
        federation = self.setup.federation
        order = Order(
            version=__version__,
            run=self.run,
            settings=self.settings,
            trunk=self.setup.trunk,
            classes=list(federation.classes),
            mean=list(federation.mean),
            std=list(federation.std),
            features=list(federation.features) if federation.images.ndim == 2 else [],
            target_sums=total_sums(federation.clients),
            kept=sorted(kept | {job.incoming.state_round for job in sent if job.incoming}),
            jobs=sent,
            dry_run=dry_run,
            sites=len(self.setup.sizes),
            secure=secure,
        )
        return pack(order, **trees)

    def _sent(self, job: ClientJob, models: Tree) -> ClientJob:
        """A job without its tensors; the model of a loss is added to `models`.

        Only its owner has a client's state: other sites see the shared part of its model.
        """
        if not isinstance(job, LossJob):
            return replace(job, incoming=replace(job.incoming, message={}))
        if job.slot is None:
            return job
        slot = len(models)
        models[str(slot)] = self.setup.layout.shared_part(self.memory.updates[job.slot])
        return replace(job, slot=slot, incoming=Incoming(job.clients[0]))

    def _candidates(self) -> Tree:
        """Directions once, whatever the number of candidates; and the buffers that all of them have."""
        layout, basis = self.setup.layout, self.memory.basis
        directions = layout.shared_parameters(basis[:-1]).contiguous()
        return {"directions": directions, "buffers": layout.shared_buffers(basis[-1]).clone()}

    def read(self, jobs: Sequence[ClientJob], reply: RecordDict) -> list[ClientResult]:
        """The results of a site's jobs; a reply that is not as it should be is an error that says why."""
        if size(reply) > self.largest:
            raise FedLDError(f"its reply has {size(reply)} bytes, more than {self.largest}")
        answer = unpack(Answer, reply)
        if answer.error is not None:
            raise SiteError(answer.error)
        if len(answer.results) != len(jobs):
            raise FedLDError(f"it answered {len(answer.results)} of {len(jobs)} jobs")
        return [self._accept(k, job, answer, reply) for k, job in enumerate(jobs)]

    def dry_run_of(self, reply: RecordDict) -> DryRun:
        """Read what a site measured in its dry run."""
        answer = unpack(Answer, reply)
        if answer.error is not None:
            raise SiteError(answer.error)
        if answer.dry_run is None:
            raise FedLDError("it sent nothing of its dry run")
        return answer.dry_run

    def _accept(self, k: int, job: ClientJob, answer: Answer, reply: RecordDict) -> ClientResult:
        """The result of job k, with the tensors that came along; what is finite is for the server to say."""
        match job:
            case PrepareJob():
                answer.read(k, Prepared)
                if self.summed:
                    return Prepared(_form(answer), True)
                message = tree(reply, "message")
                self._check_message(job, message)
                return Prepared(message, all(map(_finite, message.values())))
            case TrainJob():
                return self._trained(job, answer.read(k, Trained), answer, reply)
            case PersonalJob():
                personal = replace(answer.read(k, Personal), test=None)  # the global test set is the server's
                if personal.own is not None:
                    self._check_tally(personal.own, self.test_images[job.incoming.client])
                return personal
            case SiteTestJob():
                found, images = answer.read(k, SiteTest).models, self.test_images[job.incoming.client]
                return SiteTest({which: _sound(one, images) for which, one in found.items()})
            case LossJob():
                tally = answer.read(k, Tally)
                self._check_tally(tally, self.setup.sizes[job.clients[0]])
                return tally
            case CandidateJob() if self.summed:
                return answer.read(k, HeldVote)
            case CandidateJob():
                vote = answer.read(k, Vote)
                if vote.count > self.setup.sizes[job.incoming.client]:
                    raise FedLDError("it measured more images than it described")
                return vote

    def _trained(self, job: TrainJob, trained: Trained, answer: Answer, reply: RecordDict) -> Trained:
        layout, row = self.setup.layout, self.memory.updates[job.slot]
        row.zero_()
        if self.summed:
            if trained.metrics or trained.before or trained.after:
                raise FedLDError("it told measurements of its own, where sums alone are asked for")
            return replace(trained, message=self._held_message(answer))
        if lacking := [key for key in MEASURED if key not in trained.metrics]:
            raise FedLDError(f"its metrics lack '{lacking[0]}'")
        least = 0 if self.setup.method.second_moments else 1  # in closed form nothing is trained
        if not trained.metrics["steps"] >= least or trained.metrics["steps"] % 1:
            raise FedLDError(f"its number of steps is not a whole number of at least {least}")
        for tally in (trained.before, trained.after):
            if tally is not None:
                self._check_tally(tally, self.setup.sizes[job.incoming.client])
        if abs(trained.metrics["train_loss"]) > LARGEST_LOSS:  # NaN: it stays at the site
            raise FedLDError(f"its loss in training is above {LARGEST_LOSS:g}")
        metrics = torch.tensor([value for key, value in trained.metrics.items() if key != "train_loss"])
        update, message = self._update(tree(reply, "update")), tree(reply, "message")
        self._check_message(job, message)
        layout.set_shared(row, update)
        finite = all(map(_finite, (update, *message.values(), metrics)))
        return replace(trained, message=message, finite=finite)

    def _held_message(self, answer: Answer) -> Tree:
        """The form of a message that stays at its site, beside an update of the layout's form."""
        form, layout = _form(answer), self.setup.layout
        lengths = {PARAMETERS: layout.shared, BUFFERS: layout.shared_end - layout.trainable}
        for key, length in lengths.items():
            if key not in form or form.pop(key).shape != (length,):
                raise FedLDError(f"it keeps no update with '{key}' of {length} numbers")
        return form

    def _update(self, sent: Tree) -> Tensor:
        """The shared part of an update from the message that a site sent."""
        layout, length = self.setup.layout, self.setup.layout.shared_size
        if self.setup.transforms:
            self.setup.transforms.check_message(sent, self.setup.update_form)
            arrived = self.setup.transforms.decode(sent, layout)
            return torch.cat([arrived[PARAMETERS], arrived[BUFFERS]])
        update = sent.get("update")
        if update is None or update.shape != (length,) or update.dtype != self.memory.updates.dtype:
            raise FedLDError(f"its update is not a float32 vector of {length} numbers")
        return update

    def _check_message(self, job: PrepareJob | TrainJob, message: Tree) -> None:
        """Refuse sums that no samples of the described number can have; what is not finite comes later."""
        if not all(map(_finite, message.values())):
            return
        samples = self.setup.sizes[job.incoming.client]
        what = job.what if isinstance(job, PrepareJob) else "method"
        problems = {
            "method": self.setup.method.message_problem,
            "closed": RIDGE.message_problem,
            "features": feature_sums_problem,
            "centres": centre_sums_problem,
        }
        if problem := problems[what](message, samples):
            raise FedLDError(problem)

    def _check_tally(self, tally: Tally, images: int) -> None:
        """Refuse a tally that no measurement of at most `images` images can give.

        Without these bounds one site could decide which round's model is kept as the best.
        """
        correct = tally.sums.get("correct", 0)
        outputs = self.setup.federation.outputs if "known" in tally.sums else 1  # a label each, or a class
        if not 0 <= correct <= tally.count * outputs <= images * outputs or correct % 1:
            raise FedLDError(f"it counted {correct:g} hits of {tally.count} images, and has {images}")
        if not all(map(math.isfinite, tally.sums.values())):
            raise FedLDError("its sums are not finite")
        most = 1.01 * LARGEST_LOSS * tally.count
        if not 0 <= tally.loss <= most or not 0 <= tally.loss_squared <= LARGEST_LOSS * most:
            raise FedLDError(f"its mean loss is not between 0 and {LARGEST_LOSS:g}")


def total_sums(clients: Sequence[Client]) -> dict[str, float]:
    """Add what clients tell of their targets."""
    names = clients[0].target_sums if clients else ()
    return {name: sum(client.target_sums[name] for client in clients) for name in names}


def same_structure(results: list[JobResult | Failure], *, may_be_empty: bool = False) -> None:
    """Messages of one round are alike; one that is not like most others becomes a failure.

    With `may_be_empty` a client may have nothing to say, since it said it before.
    """
    kinds = {
        k: tuple(sorted((key, tuple(t.shape), str(t.dtype)) for key, t in result.message.items()))
        for k, result in enumerate(results)
        if isinstance(result, Prepared | Trained) and (result.message or not may_be_empty)
    }
    usual = Counter(kinds.values()).most_common(1)
    for k, kind in kinds.items():
        if kind != usual[0][0]:
            results[k] = Failure("its message has another structure than the other sites'", "", "malformed")


def _sound(one: SiteResult, images: int) -> SiteResult:
    """A site's result as it may be written down: shares of at most `images` pictures, in order."""
    for estimate in one.estimates:
        known = [x for x in (estimate.low, estimate.value, estimate.high) if x is not None]
        if not all(0 <= x <= 1 for x in known) or known != sorted(known):
            raise FedLDError("its results are no shares")
    if not 0 < one.pictures <= images or not 0 <= (one.patients or 0) <= one.pictures:
        raise FedLDError("its results are of an impossible number of pictures")
    return one


def _form(answer: Answer) -> Tree:
    """The form of what a site keeps for a sum."""
    return answer.held.form() if answer.held else {}


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
