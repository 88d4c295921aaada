"""A site's side of secure rounds: the result that it keeps, its part in the computation, its journal.

Every message of the server is handled by a process of its own, so a computation's state lies in the run's
folder at the site between two messages, readable by the site's account alone:

journal.jsonl   what was signed and given, written before each answer; it is never removed
held.npy        the result of the round's job, as one vector
held.json       which result it is, and how it is added up
state.json      the site in the computation, with its secrets

All but the journal is removed with the last message.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from fedld.engine.backends.flower.wire import Held, Order, SecureRequest, SecureStep
from fedld.engine.jobs import CandidateJob, ClientJob, PrepareJob, RoundJob
from fedld.engine.summing import prepared_entries, update_entries, vote_entries, weight_of
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Method
from fedld.privacy.context import SumContext
from fedld.privacy.fixed_point import FixedPoint, Integers, Segment
from fedld.privacy.journal import Journal
from fedld.privacy.numbered import (
    SiteSide,
    answer_sum,
    begin_sum,
    state_from_bytes,
    state_to_bytes,
)
from fedld.privacy.peers import Peers
from fedld.privacy.sum_site import SumSite
from fedld.records.writer import write_atomically
from fedld.transforms import SummedEntry
from fedld.transforms.secure import BITS, sum_code, sum_vector

MODEL_TREES = ("weights", "common", "candidates")
"""What all sites get of a model: its digest is part of the context."""
LAST = 5
"""The last message of a secure sum."""


@dataclass(frozen=True, kw_only=True)
class HeldResult:
    """A result that stays at the site, and what the context of its sum says of it.

    Args:
        run: the run.
        round: the round.
        purpose: which result of the round.
        model: SHA-256 of the model that the site received.
        settings: SHA-256 of the settings that it was given.
        weight: how much the site counts.
        largest_weight: how much the largest site counts.
        segments: how the vector's stretches are added up.
    """

    run: str
    round: int
    purpose: str
    model: str
    settings: str
    weight: int
    largest_weight: int
    segments: tuple[Segment, ...]

    def context(self, attempt: int, participants: Mapping[str, str]) -> SumContext:
        """Make the context of a sum of this result over some sites."""
        code = FixedPoint(
            bits=BITS,
            sites=len(participants),
            largest_weight=self.largest_weight,
            segments=self.segments,
        )
        return SumContext(
            run=self.run,
            round=self.round,
            purpose=self.purpose,
            attempt=attempt,
            model=self.model,
            settings=self.settings,
            participants=participants,
            code=code,
        )


def held_result(
    order: Order,
    trees: Mapping[str, Tree],
    job: RoundJob,
    method: Method,
    form: Tree,
    *,
    largest: int,
    samples: int,
    with_message: bool,
) -> HeldResult:
    """Describe the result of a round's job; the server and every site make the same of what they have.

    Args:
        order: the order as it was sent, or received.
        trees: its tensors, by name.
        job: the round's job.
        method: the method.
        form: the summed entries of the result, or tensors of their shapes.
        largest: images of the largest site.
        samples: images of this one.
        with_message: whether a message for single sites came with the job.
    """
    largest_weight = int(weight_of(method, largest))
    code = sum_code(form, job_entries(job, method, largest), sites=1, largest_weight=largest_weight)
    return HeldResult(
        run=order.run,
        round=job.round,
        purpose=purpose_of(job, with_message=with_message),
        model=model_digest(trees),
        settings=settings_digest(order),
        weight=int(weight_of(method, samples)),
        largest_weight=largest_weight,
        segments=code.segments,
    )


def round_job(jobs: list[ClientJob]) -> RoundJob | None:
    """Give the job of an order of which the result is summed; there is at most one.

    Raises:
        FedLDError: there are several.
    """
    found = [job for job in jobs if isinstance(job, RoundJob)]
    if len(found) > 1:
        raise FedLDError("an order of a secure round has one job of which the result is summed")
    return found[0] if found else None


def job_entries(job: RoundJob, method: Method, largest: int) -> dict[str, SummedEntry]:
    """Give how the result of a job is added up, where the largest site has so many images."""
    if isinstance(job, PrepareJob):
        return prepared_entries(method, job.what, largest)
    return (vote_entries if isinstance(job, CandidateJob) else update_entries)(method, largest)


def purpose_of(job: RoundJob, *, with_message: bool) -> str:
    """Name a result within its round: a closed start asks twice, the second time with a plan."""
    if isinstance(job, PrepareJob):
        return f"{job.what} 2" if with_message and job.what == "closed" else job.what
    return job.kind


def model_digest(trees: Mapping[str, Tree]) -> str:
    """SHA-256 of what a round starts from: names, types, shapes and numbers of all tensors."""
    found = hashlib.sha256()
    for name in MODEL_TREES:
        for key, tensor in sorted(trees.get(name, {}).items()):
            value = tensor.detach().contiguous().cpu()
            found.update(repr((name, key, str(value.dtype), tuple(value.shape))).encode())
            found.update(value.reshape(-1).numpy().tobytes())
    return found.hexdigest()


def settings_digest(order: Order) -> str:
    """SHA-256 of the settings of a run, as the sites are given them."""
    fields = {"settings", "classes", "mean", "std", "trunk", "features", "target_sums"}
    facts = order.model_dump(include=fields)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SecureSite:
    """A site in the secure rounds of one run.

    Args:
        folder: the run's folder for secure rounds, at the site.
        peers: the site's key and the keys it has pinned.
        least: fewest sites of a sum, by its policy.
    """

    folder: Path
    peers: Peers
    least: int = 0

    def hold(self, held: HeldResult, message: Tree, entries: Mapping[str, SummedEntry]) -> None:
        """Keep a result for its sum, in place of the last one.

        Raises:
            FedLDError: a number is beyond its bound or not finite.
        """
        vector = sum_vector(message, entries)
        code = FixedPoint(bits=BITS, sites=1, largest_weight=held.largest_weight, segments=held.segments)
        code.encode(vector, held.weight)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "state.json").unlink(missing_ok=True)
        with (self.folder / "held.npy").open("wb") as file:
            np.save(file, vector)
        write_atomically(self.folder / "held.json", json.dumps(asdict(held)).encode())

    def begin(self, request: SecureRequest) -> bytes:
        """Give message 1 of a computation over the result that is kept."""
        held = self._held()
        context = held.context(request.attempt, self.peers.participants(request.participants))
        state, message = begin_sum(context, self._side())
        self._save(state)
        return message

    def answer(self, step: SecureStep, content: bytes) -> bytes:
        """Give a later message, or message 1 of a further attempt."""
        if step.request is not None:
            if step.number != 1:
                raise FedLDError("a secure computation begins with message 1")
            return self.begin(step.request)
        try:
            state = state_from_bytes(SumSite, (self.folder / "state.json").read_bytes())
        except OSError:
            raise FedLDError("it is in no secure computation, or has sent its last message") from None
        if step.context != state.context.digest:
            raise FedLDError("it is in another secure computation")
        state, message = answer_sum(state, step.number, content, self._side())
        if step.number == LAST:
            for name in ("state.json", "held.json", "held.npy"):
                (self.folder / name).unlink()
        else:
            self._save(state)
        return message

    def _side(self) -> SiteSide:
        return SiteSide(
            site=self.peers.site,
            identity=self.peers.identity,
            journal=Journal(self.folder / "journal.jsonl"),
            vector=self._vector,
            least=self.least,
        )

    def _vector(self, context: SumContext) -> Integers:
        vector = np.load(self.folder / "held.npy", allow_pickle=False)
        return context.code.encode(vector, self._held().weight)

    def _held(self) -> HeldResult:
        try:
            return TypeAdapter(HeldResult).validate_json((self.folder / "held.json").read_bytes())
        except (OSError, ValueError):
            raise FedLDError("it keeps no result that could be summed") from None

    def _save(self, state: SumSite) -> None:
        write_atomically(self.folder / "state.json", state_to_bytes(state))


def held_form(message: Tree, entries: Mapping[str, SummedEntry]) -> Held:
    """Describe the entries of a result that is kept."""
    shapes = {
        key: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in message.items()
        if key in entries
    }
    return Held.model_validate({"entries": shapes})
