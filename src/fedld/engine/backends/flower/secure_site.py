"""A site's side of secure rounds: the result that it keeps, its part in the computation, its journal.

Every message of the server is handled by a process of its own, so a computation's state lies in the run's
folder at the site between two messages, readable by the site's account alone:

journal.jsonl   what was signed and given, written before each answer; it is never removed
held.npy        the result of the round's job, as one vector
held.json       which result it is, and how it is added up
gram.json       the site in the Gram matrix of the round, where there is one, with its secrets
share.json      its coefficient in the sum that follows a Gram matrix
state.json      the site in the sum, with its secrets

All but the journal is removed with the last message.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from fedld.engine.backends.flower.wire import Held, Order, SecureRequest, SecureStep
from fedld.engine.jobs import CandidateJob, ClientJob, PrepareJob, RoundJob
from fedld.engine.summing import (
    count_sketch,
    hidden_updates,
    prepared_entries,
    update_entries,
    vote_entries,
    weight_of,
)
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Method
from fedld.privacy.context import GramContext, SumContext, digest
from fedld.privacy.fixed_point import FixedPoint, Integers, Segment
from fedld.privacy.gram import (
    Coefficients,
    GramSite,
    OpenedGram,
    check_coefficients,
    combination_digest,
    length_exponent,
)
from fedld.privacy.journal import Journal
from fedld.privacy.numbered import (
    SiteSide,
    answer_gram,
    answer_sum,
    begin_gram,
    begin_sum,
    site_opens_gram,
    state_from_bytes,
    state_to_bytes,
)
from fedld.privacy.peers import Peers
from fedld.privacy.sum_site import SumSite
from fedld.records.writer import write_atomically
from fedld.transforms import PARAMETERS, SummedEntry
from fedld.transforms.secure import BITS, combined_bound, sketch_length, sum_code, sum_vector

MODEL_TREES = ("weights", "common", "candidates")
"""What all sites get of a model: its digest is part of the context."""
LAST = 5
"""The last message of a secure sum."""
FILES = ("state.json", "share.json", "gram.json", "held.json", "held.npy")
"""What a site keeps between the messages of a secure computation, beside its journal."""
T = TypeVar("T")


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
        combined_by: the settings that name the rule by which updates are combined, empty for a plain sum.
    """

    run: str
    round: int
    purpose: str
    model: str
    settings: str
    weight: int
    largest_weight: int
    segments: tuple[Segment, ...]
    combined_by: str = ""

    def gram_context(self, attempt: int, participants: Mapping[str, str], bound: float) -> GramContext:
        """Make the context of the Gram matrix of this round's updates over some sites."""
        dimension = next(one.length for one in self.segments if one.name == PARAMETERS)
        return GramContext(
            run=self.run,
            round=self.round,
            purpose=f"{self.purpose} gram",
            attempt=attempt,
            model=self.model,
            settings=self.settings,
            participants=participants,
            length=sketch_length(dimension),
            dimension=dimension,
            bound=bound,
        )

    def combined(self, opened: OpenedGram, coefficients: Coefficients) -> "HeldResult":
        """Describe the result as it goes into a sum with coefficients: bound to them and to the matrix."""
        bound = combined_bound(coefficients)
        return replace(
            self,
            settings=digest("combined", self.settings, combination_digest(opened, coefficients)),
            segments=tuple(
                Segment(one.name, one.length, one.bound * bound, False) if one.name == PARAMETERS else one
                for one in self.segments
            ),
        )

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
        combined_by=order.settings if order.secure and order.secure.computation == "gram" else "",
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
        method: gives the method that settings name.
        least: fewest sites of a sum, by its policy.
    """

    folder: Path
    peers: Peers
    method: Callable[[str], Method] = field(repr=False)
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
        self._remove()
        with (self.folder / "held.npy").open("wb") as file:
            np.save(file, vector)
        write_atomically(self.folder / "held.json", json.dumps(asdict(held)).encode())

    def length_exponent(self) -> int:
        """Give the power of two that bounds the length of the update that is kept."""
        return length_exponent(self._parameters(np.load(self.folder / "held.npy", allow_pickle=False)))

    def begin(self, request: SecureRequest, content: bytes = b"") -> bytes:
        """Give message 1 of a computation over the result that is kept.

        Args:
            request: which computation.
            content: what opens the Gram matrix that came before it, where there was one.

        Raises:
            FedLDError: the computation is not the one that this result is kept for.
        """
        held = self._held()
        participants = self.peers.participants(request.participants)
        if request.computation == "gram":
            if not held.combined_by or request.bound is None:
                raise FedLDError("its result is kept for another computation than a Gram matrix")
            context = held.gram_context(request.attempt, participants, request.bound)
            gram, message = begin_gram(context, self._side())
            self._save(gram, "gram.json")
            return message
        # A coefficient belongs to one sum: no earlier one goes on with it.
        (self.folder / "state.json").unlink(missing_ok=True)
        if held.combined_by:
            held = self._combined(held, request, content)
        state, message = begin_sum(held.context(request.attempt, participants), self._side())
        self._save(state, "state.json")
        return message

    def _combined(self, held: HeldResult, request: SecureRequest, opening: bytes) -> HeldResult:
        """Open the Gram matrix, compute the coefficients again, and keep this site's own.

        Raises:
            FedLDError: the published coefficients or weights are not those that follow.
        """
        gram, published = self._state(GramSite, "gram.json"), request.published
        if gram is None or published is None:
            raise FedLDError(
                "its result is summed with coefficients of a Gram matrix only, and there is none"
            )
        sites = sorted(request.participants)
        if not set(sites) <= set(gram.context.sites):
            raise FedLDError("a site of the sum was not in the Gram matrix")
        coefficients, weights = np.array(published.coefficients), np.array(published.weights, np.float64)
        own = sites.index(self.peers.site)
        if len(weights) != len(sites) or weights[own] != held.weight or not weights.min() > 0:
            raise FedLDError("the published weights are not those of the sites: its own is another one")
        if weights.max() > held.largest_weight:
            raise FedLDError("a published weight is larger than that of the largest site")
        opened = site_opens_gram(gram, opening).among([gram.context.sites.index(site) for site in sites])
        rule = hidden_updates(self.method(held.combined_by), sites).coefficients
        check_coefficients(opened, weights / weights.sum(), coefficients, rule)
        share = {"coefficient": float(coefficients[own]), "sites": len(sites)}
        write_atomically(self.folder / "share.json", json.dumps(share).encode())
        return held.combined(opened, coefficients)

    def answer(self, step: SecureStep, content: bytes) -> bytes:
        """Give a later message, or message 1 of a further attempt."""
        if step.request is not None:
            if step.number != 1:
                raise FedLDError("a secure computation begins with message 1")
            return self.begin(step.request, content)
        gram = self._state(GramSite, "gram.json")
        if gram is not None and step.context == gram.context.digest:
            gram, message = answer_gram(gram, step.number, content, self._side())
            self._save(gram, "gram.json")
            return message
        state = self._state(SumSite, "state.json")
        if state is None and gram is None:
            raise FedLDError("it is in no secure computation, or has sent its last message")
        if state is None or step.context != state.context.digest:
            raise FedLDError("it is in another secure computation")
        state, message = answer_sum(state, step.number, content, self._side())
        if step.number == LAST:
            self._remove()
        else:
            self._save(state, "state.json")
        return message

    def _side(self) -> SiteSide:
        _, sites = self._share()
        return SiteSide(
            site=self.peers.site,
            identity=self.peers.identity,
            journal=Journal(self.folder / "journal.jsonl"),
            vector=self._vector,
            sketch=self._sketch,
            # Coefficients belong to all sites of a combination, so a sum that lacks one is not signed.
            least=max(self.least, sites),
            bound_by="the combination of all its sites" if sites > self.least else "its policy",
        )

    def _vector(self, context: SumContext) -> Integers:
        vector = np.load(self.folder / "held.npy", allow_pickle=False)
        coefficient, _ = self._share()
        self._parameters(vector)[:] *= coefficient
        return context.code.encode(vector, self._held().weight)

    def _sketch(self, context: GramContext, seed: int) -> npt.NDArray[np.floating]:
        vector = np.load(self.folder / "held.npy", allow_pickle=False)
        return count_sketch(self._parameters(vector), context.length, seed)

    def _parameters(self, vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The update's part of a kept vector, as a view."""
        start = 0
        for segment in self._held().segments:
            if segment.name == PARAMETERS:
                return vector[start : start + segment.length]
            start += segment.length
        return vector[:0]

    def _share(self) -> tuple[float, int]:
        """This site's coefficient and the number of sites of a combination; 1 and 0 in a plain sum."""
        try:
            share = json.loads((self.folder / "share.json").read_bytes())
            return float(share["coefficient"]), int(share["sites"])
        except FileNotFoundError:
            return 1.0, 0
        except (OSError, ValueError, KeyError, TypeError):
            raise FedLDError("its coefficient of the combination is damaged: no answer") from None

    def _remove(self) -> None:
        for name in FILES:
            (self.folder / name).unlink(missing_ok=True)

    def _state(self, kind: type[T], name: str) -> T | None:
        try:
            return state_from_bytes(kind, (self.folder / name).read_bytes())
        except OSError:
            return None

    def _held(self) -> HeldResult:
        try:
            return TypeAdapter(HeldResult).validate_json((self.folder / "held.json").read_bytes())
        except (OSError, ValueError):
            raise FedLDError("it keeps no result that could be summed") from None

    def _save(self, state: SumSite | GramSite, name: str) -> None:
        write_atomically(self.folder / name, state_to_bytes(state))


def held_form(message: Tree, entries: Mapping[str, SummedEntry]) -> Held:
    """Describe the entries of a result that is kept."""
    shapes = {
        key: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in message.items()
        if key in entries
    }
    return Held.model_validate({"entries": shapes})
