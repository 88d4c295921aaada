"""The server's side of secure rounds: it keeps the sites' first messages, carries the others, opens the sum.

The result of a round's job stays at its site. With its answer to the order a site sends message 1 of a sum
over all sites that were asked. Messages 2 to 5 are exchanges of their own. If too few sites are left before
the sum is opened, the sites that still answer begin a further attempt among themselves. An opened sum is
written to the run directory at once: no site helps to open a second one of the same round.

Under `secure = "gram"` a site tells the length of its update as a power of two with its answer to an order of
training. The three messages of the Gram matrix follow, then the five of a sum with the coefficients of the
rule. If a site leaves between the two, the coefficients are computed again from the others' part of the
matrix.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from flwr.app import RecordDict

from fedld import __version__
from fedld.engine.backends.flower.orders import SiteError
from fedld.engine.backends.flower.secure_site import HeldResult, held_result, purpose_of, round_job
from fedld.engine.backends.flower.sites import Patience, Sites, exchange
from fedld.engine.backends.flower.wire import (
    Answer,
    Order,
    PublishedCoefficients,
    SecureRequest,
    SecureStep,
    carried,
    carried_bytes,
    pack,
    tree,
    tree_names,
    unpack,
)
from fedld.engine.jobs import ClientJob, Failure, Job, RoundJob, Setup
from fedld.engine.summing import hidden_updates, weights_of
from fedld.errors import FedLDError, printable
from fedld.layout import Tree
from fedld.privacy.context import LEAST_SITES, GramContext, SecureContext, SumContext
from fedld.privacy.gram import check_coefficients, sketch_bound
from fedld.privacy.numbered import GramResult, open_gram, open_sum
from fedld.records.ledger import Ledger
from fedld.transforms import CombinedTotal, SummedEntry, Total
from fedld.transforms.secure import sum_total

ATTEMPTS = 3
"""Attempts to open the sum of a round."""
GRACE = 60.0
"""Seconds to wait for the others once enough sites have sent a message."""
VECTORS = 3
"""The message of a secure sum that has the masked vector."""
SPARE = 1 << 20
"""Bytes of a message beside its vector."""


@dataclass
class HeldResults:
    """What the sites keep of one round's job: its description, and the first messages by attempt and site."""

    described: HeldResult
    participants: tuple[str, ...]
    attempt: int
    first: dict[str, bytes] = field(default_factory=dict)
    exponents: dict[str, int] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)


class SecureServer:
    """The secure sums of a run.

    Args:
        setup: the run.
        sites: who takes part.
        run: its name.
        folder: where opened sums are written until the next ones are.
        ledger: the server's record.
    """

    def __init__(self, setup: Setup, sites: Sites, run: str, folder: Path, ledger: Ledger) -> None:
        self.setup, self.sites, self.run, self.folder, self.ledger = setup, sites, run, folder, ledger
        self.largest = max(setup.sizes.values())
        self.identities = {one.site: one.identity or "" for one in sites.fixed or ()}
        self.held: HeldResults | None = None
        self._last_attempt = 0
        self._problems: dict[str, str] = {}
        self._bytes = {"sent": 0, "delivered": 0}

    def request(
        self,
        participants: Sequence[str],
        computation: Literal["sum", "gram"] = "sum",
        *,
        bound: float | None = None,
        published: PublishedCoefficients | None = None,
    ) -> SecureRequest:
        """Ask some sites to keep their results, or to begin a computation over them."""
        # Not counted from 0: a server that was started again must not repeat a number.
        self._last_attempt = max(self._last_attempt + 1, time.time_ns() // 1_000_000)
        return SecureRequest(
            computation=computation,
            participants=sorted(participants),
            largest=self.largest,
            attempt=self._last_attempt,
            bound=bound,
            published=published,
        )

    def begin(self, jobs: Iterable[Job]) -> None:
        """Forget the results of the last job, unless these jobs ask for the same of sites that failed."""
        asked = {
            (job.round, purpose_of(job, with_message=bool(job.incoming.message)))
            for job in jobs
            if isinstance(job, RoundJob)
        }
        if self.held is not None and (self.held.described.round, self.held.described.purpose) not in asked:
            self.held = None

    @property
    def holders(self) -> set[str]:
        """The sites that keep a result of the last job."""
        return set(self.held.holders) if self.held else set()

    def keep(self, site: str, jobs: list[ClientJob], sent: RecordDict, reply: RecordDict) -> None:
        """Take a site's first message out of its answer to an order."""
        order, answer = unpack(Order, sent), unpack(Answer, reply)
        job = round_job(jobs)
        if order.secure is None or job is None or answer.held is None or not answer.held.entries:
            return
        if self.held is None or self.held.attempt != order.secure.attempt:
            described = held_result(
                order,
                {name: tree(sent, name) for name in tree_names(sent)},
                job,
                self.setup.method,
                answer.held.form(),
                largest=self.largest,
                samples=1,
                with_message=bool(job.incoming.message),
            )
            before = self.held
            self.held = HeldResults(
                described,
                tuple(order.secure.participants),
                order.secure.attempt,
                exponents=before.exponents if before else {},
                holders=before.holders if before else set(),
            )
        if order.secure.computation == "gram":
            if answer.held.exponent is None:
                raise FedLDError("it did not announce the length of its update")
            self.held.exponents[site] = answer.held.exponent
        else:
            self.held.first[site] = carried_bytes(reply)
        self.held.holders.add(site)

    def total(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> Total:
        """Open the sum of what the sites keep.

        Args:
            messages: the sites whose results count, with the form of each.
            weights: how much each site counts.
            entries: how each entry is added up.

        Raises:
            FedLDError: too few sites were left in every attempt.
        """
        form = next(iter(messages.values()))
        held = self._results()
        if (opened := self._written(held.described)) is None:
            total, survivors = self._open([site for site in messages if site in held.holders])
            opened = {"total": total, "survivors": np.array(survivors)}
            self._write(held.described, opened)
        return sum_total(opened["total"], _names(opened), form, entries, self._weights)

    def combine(
        self,
        messages: Mapping[str, Tree],
        weights: Mapping[str, float],
        entries: Mapping[str, SummedEntry],
    ) -> CombinedTotal:
        """Open the Gram matrix of the updates that the sites keep, and their sum with coefficients.

        Args:
            messages: the sites whose results count, with the form of each.
            weights: how much each site counts.
            entries: how each entry is added up.

        Raises:
            FedLDError: too few sites were left in every attempt.
        """
        form, held = next(iter(messages.values())), self._results()
        if (opened := self._written(held.described)) is None:
            self._bytes = {"sent": 0, "delivered": 0}
            opened = self._combine(sorted(site for site in messages if site in held.holders))
            self._write(held.described, opened)
        sites = _names(opened)
        total = sum_total(opened["total"], sites, form, entries, self._weights)
        order = [sites.index(site) for site in self.setup.sizes if site in sites]
        return CombinedTotal(
            clients=tuple(sites[k] for k in order),
            weight=total.weight,
            sums=total.sums,
            matrix=opened["matrix"][np.ix_(order, order)],
            shares=opened["shares"][order],
            length=int(opened["length"]),
            seed=int(opened["seed"]),
            sent=int(opened["sent"]),
            delivered=int(opened["delivered"]),
        )

    @property
    def _weights(self) -> dict[str, float]:
        """How much every site of the run counts; one in a written sum may be away now."""
        return weights_of(self.setup, self.setup.sizes)

    def _results(self) -> HeldResults:
        if self.held is None:
            raise FedLDError("no site keeps a result of this round, so there is nothing to sum")
        return self.held

    def _combine(self, sites: list[str]) -> dict[str, np.ndarray]:
        """Open the matrix and the sum with its coefficients, with whatever attempts that takes."""
        context, gram, present = self._open_gram(sites)
        traffic = dict(self._bytes)
        for _ in range(ATTEMPTS):
            if len(present) < LEAST_SITES:
                break
            chosen = gram.opened.among([context.sites.index(site) for site in present])
            counts = np.array([self._weights[site] for site in present])
            shares = counts / counts.sum()
            rule = hidden_updates(self.setup.method, present).coefficients
            coefficients = rule(chosen.matrix, shares)
            check_coefficients(chosen, shares, coefficients, rule)
            published = PublishedCoefficients(
                coefficients=coefficients.tolist(), weights=[int(count) for count in counts]
            )
            described = self._results().described.combined(chosen, coefficients)
            total, answered = self._sum_of_all(described, present, published, gram.opening)
            if total is not None:
                return {
                    "total": total,
                    "survivors": np.array(present),
                    "matrix": chosen.matrix,
                    "shares": shares,
                    "length": np.array(context.length),
                    "seed": np.array(gram.seed),
                    **{key: np.array(count) for key, count in traffic.items()},
                }
            present = answered
        raise self._not_opened("the sum with the coefficients of the Gram matrix", [])

    def _open_gram(self, sites: list[str]) -> tuple[GramContext, GramResult, list[str]]:
        """Open the Gram matrix; gives the sites that are still there as well."""
        held, reasons = self._results(), list[str]()
        for _ in range(ATTEMPTS):
            if len(sites) < GramContext.least_sites:
                reasons.append(f"{len(sites)} sites are left, {GramContext.least_sites} are needed")
                break
            bound = sketch_bound(held.exponents[site] for site in sites)
            request = self.request(sites, "gram", bound=bound)
            context = held.described.gram_context(request.attempt, self._keys(sites), bound)
            carrier = _Carrier(self, context)
            first = carrier.begin(dict.fromkeys(sites, b""), request)
            try:
                result = open_gram(context, first, carrier.ask, self._refuse)
                return context, result, carrier.answered
            except FedLDError as error:
                reasons.append(str(error))
                sites = carrier.answered
        raise self._not_opened("the secure Gram matrix", reasons)

    def _sum_of_all(
        self, described: HeldResult, sites: list[str], published: PublishedCoefficients, opening: bytes
    ) -> tuple[np.ndarray | None, list[str]]:
        """Open a sum in which every one of some sites is; gives nothing, and who answered, if one left."""
        request = self.request(sites, published=published)
        context = described.context(request.attempt, self._keys(sites))
        carrier = _Carrier(self, context, everybody=len(sites))
        try:
            first = carrier.begin(dict.fromkeys(sites, opening), request)
            opened = open_sum(context, first, carrier.ask, self._refuse)
        except FedLDError:
            return None, carrier.answered
        return context.code.decode(opened.total), carrier.answered

    def _open(self, sites: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
        held, reasons = self._results(), list[str]()
        first = {site: content for site, content in held.first.items() if site in sites}
        context = held.described.context(held.attempt, self._keys(held.participants))
        for attempt in range(ATTEMPTS):
            if attempt or set(first) != set(sites) or len(first) < context.threshold:
                if len(sites) < LEAST_SITES:
                    break
                request = self.request(sites)
                context = held.described.context(request.attempt, self._keys(sites))
                carrier = _Carrier(self, context)
                first = carrier.begin(dict.fromkeys(sites, b""), request)
            else:
                carrier = _Carrier(self, context, answered=list(first))
            try:
                opened = open_sum(context, first, carrier.ask, self._refuse)
                return context.code.decode(opened.total), opened.survivors
            except FedLDError as error:
                reasons.append(str(error))
                sites = [site for site in sites if site in carrier.answered]
        if not reasons:
            reasons.append(f"{len(sites)} sites keep a result, {LEAST_SITES} are needed")
        raise self._not_opened("the secure sum", reasons)

    def _not_opened(self, what: str, reasons: list[str]) -> FedLDError:
        held = self._results().described
        why = "; ".join(dict.fromkeys([*reasons, *(f"{s}: {w}" for s, w in self._problems.items())]))
        return FedLDError(f"round {held.round}: {what} '{held.purpose}' was not opened: {why}")

    def _keys(self, sites: Sequence[str]) -> dict[str, str]:
        return {site: self.identities[site] for site in sites}

    def _ask(
        self,
        context: SecureContext,
        number: int,
        answers: Mapping[str, bytes],
        request: SecureRequest | None = None,
    ) -> dict[str, bytes]:
        """Carry one message of a computation to some sites, and their next ones back."""
        self._problems = {}
        step = SecureStep(
            version=__version__, run=self.run, number=number, context=context.digest, request=request
        )
        present = self.sites.present
        nodes = {site: present[site] for site in answers if site in present}
        contents = {node: pack(step, secure=carried(answers[site])) for site, node in nodes.items()}
        experiment = self.setup.experiment
        limit = experiment.round_timeout or 3600.0
        grace = GRACE if experiment.grace is None else experiment.grace
        most = 3 * _message_bytes(context) + SPARE  # a grid counts pieces on the wire, and the array of them
        patience = Patience(limit, max(context.threshold, LEAST_SITES), grace)
        replies = exchange(self.sites.grid, contents, "train.secure", patience, most)
        messages: dict[str, bytes] = {}
        for site in answers:
            try:
                messages[site] = _message(replies[nodes[site]] if site in nodes else None)
            except FedLDError as error:
                self._refuse(site, str(error))
        self._bytes["sent"] += sum(map(len, messages.values()))
        self._bytes["delivered"] += sum(len(answers[site]) for site in nodes)
        self.ledger.append(
            "secure",
            run=self.run,
            round=context.round,
            purpose=context.purpose,
            context=context.digest,
            message=number,
            sites=sorted(messages),
            missing=self._problems,
        )
        return messages

    def _refuse(self, site: str, why: str) -> None:
        self._problems[site] = printable(why)

    def _file(self, held: HeldResult) -> Path:
        return self.folder / f"round{held.round}-{held.purpose.replace(' ', '-')}.npz"

    def _written(self, held: HeldResult) -> dict[str, np.ndarray] | None:
        """Read a sum that was opened before the server stopped, of the same model and settings."""
        try:
            with np.load(self._file(held), allow_pickle=False) as written:
                arrays = dict(written)
        except (OSError, ValueError, KeyError):
            return None
        return arrays if str(arrays.pop("held", "")) == _described(held) else None

    def _write(self, held: HeldResult, arrays: Mapping[str, np.ndarray]) -> None:
        """Write an opened sum; those of earlier rounds are no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob("round*.npz"):
            if not file.name.startswith(f"round{held.round}-"):
                file.unlink()
        with self._file(held).open("wb") as written:
            np.savez(written, allow_pickle=False, held=np.array(_described(held)), **arrays)


class _Carrier:
    """Carries the messages of one computation, and remembers who answered the last one.

    Args:
        server: who carries.
        context: the computation.
        answered: the sites that have sent message 1 already.
        everybody: how many sites must be left until all vectors have come; 0 for as many as the threshold.
    """

    def __init__(
        self,
        server: SecureServer,
        context: SecureContext,
        *,
        answered: Sequence[str] = (),
        everybody: int = 0,
    ) -> None:
        self.server, self.context, self.everybody = server, context, everybody
        self.answered = list(answered)

    def begin(self, contents: Mapping[str, bytes], request: SecureRequest) -> dict[str, bytes]:
        """Carry message 1 of an attempt."""
        self.server.sites.refresh()
        return self._carry(1, contents, request)

    def ask(self, number: int, contents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Carry a later message."""
        return self._carry(number, contents, None)

    def _carry(
        self, number: int, contents: Mapping[str, bytes], request: SecureRequest | None
    ) -> dict[str, bytes]:
        messages = self.server._ask(self.context, number, contents, request)
        self.answered = sorted(messages)
        if number <= VECTORS and len(messages) < self.everybody:
            raise FedLDError(
                f"{len(messages)} of {self.everybody} sites are left; it begins again with these"
            )
        return messages


def _message_bytes(context: SecureContext) -> int:
    """Bytes of the largest message of a computation, about."""
    if isinstance(context, SumContext):
        return context.code.length * context.code.dtype.itemsize
    assert isinstance(context, GramContext)
    return 8 * len(context.sites) * (context.length + len(context.sites) ** 2)


def _names(opened: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    return tuple(str(site) for site in opened["survivors"])


def _described(held: HeldResult) -> str:
    return json.dumps([held.run, held.round, held.purpose, held.model])


def _message(reply: RecordDict | Failure | None) -> bytes:
    """The bytes of a site's message.

    Raises:
        FedLDError: there are none; it says why.
    """
    if reply is None:
        raise FedLDError("the site is not connected")
    if isinstance(reply, Failure):
        raise FedLDError(reply.error)
    answer = unpack(Answer, reply)
    if answer.error is not None:
        raise SiteError(answer.error)
    return carried_bytes(reply)
