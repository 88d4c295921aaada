"""The server's side of secure rounds: it keeps the sites' first messages, carries the others, opens the sum.

The result of a round's job stays at its site. With its answer to the order a site sends message 1 of a sum
over all sites that were asked. Messages 2 to 5 are exchanges of their own. If too few sites are left before
the sum is opened, the sites that still answer begin a further attempt among themselves. An opened sum is
written to the run directory at once: no site helps to open a second one of the same round.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import RecordDict

from fedld import __version__
from fedld.engine.backends.flower.orders import SiteError
from fedld.engine.backends.flower.secure_site import HeldResult, held_result, round_job
from fedld.engine.backends.flower.sites import Patience, Sites, exchange
from fedld.engine.backends.flower.wire import (
    Answer,
    Order,
    SecureRequest,
    SecureStep,
    carried,
    carried_bytes,
    pack,
    tree,
    tree_names,
    unpack,
)
from fedld.engine.jobs import ClientJob, Failure, Setup
from fedld.engine.summing import weights_of
from fedld.errors import FedLDError, printable
from fedld.layout import Tree
from fedld.privacy.context import LEAST_SITES, SumContext
from fedld.privacy.numbered import open_sum
from fedld.records.ledger import Ledger
from fedld.transforms import SummedEntry, Total
from fedld.transforms.secure import sum_total

ATTEMPTS = 3
"""Attempts to open the sum of a round."""
GRACE = 60.0
"""Seconds to wait for the others once enough sites have sent a message."""
SPARE = 1 << 20
"""Bytes of a message beside its vector."""


@dataclass
class HeldResults:
    """What the sites keep of one round's job: its description, and the first messages by attempt and site."""

    described: HeldResult
    participants: tuple[str, ...]
    attempt: int
    first: dict[str, bytes] = field(default_factory=dict)
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

    def request(self, participants: Sequence[str]) -> SecureRequest:
        """Ask some sites to keep their results and to begin a sum over them."""
        # Not counted from 0: a server that was started again must not repeat a number.
        self._last_attempt = max(self._last_attempt + 1, time.time_ns() // 1_000_000)
        return SecureRequest(
            participants=sorted(participants), largest=self.largest, attempt=self._last_attempt
        )

    def begin(self) -> None:
        """Forget the results of the last job."""
        self.held = None

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
            holders = set() if self.held is None else self.held.holders
            names = tuple(order.secure.participants)
            self.held = HeldResults(described, names, order.secure.attempt, holders=holders)
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
        if self.held is None:
            raise FedLDError("no site keeps a result of this round, so there is nothing to sum")
        held = self.held.described
        if (opened := self._written(held)) is None:
            opened = self._open([site for site in messages if site in self.held.holders])
            self._write(held, *opened)
        total, survivors = opened
        everybody = weights_of(self.setup, self.setup.sizes)  # one in a written sum may be away now
        return sum_total(total, survivors, form, entries, everybody)

    def _open(self, sites: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
        assert self.held is not None
        held, reasons = self.held, list[str]()
        first = {site: content for site, content in held.first.items() if site in sites}
        context = held.described.context(held.attempt, self._keys(held.participants))
        for attempt in range(ATTEMPTS):
            late = set(sites) - set(held.participants)
            if attempt or late or len(first) < context.threshold:
                if len(sites) < LEAST_SITES:
                    break
                request = self.request(sites)
                context = held.described.context(request.attempt, self._keys(sites))
                self.sites.refresh()
                first = self._ask(context, 1, dict.fromkeys(sites, b""), request)
            answered = dict.fromkeys(first)

            def ask(number: int, answers: Mapping[str, bytes], context: SumContext) -> dict[str, bytes]:
                nonlocal answered
                found = self._ask(context, number, answers)
                answered = dict.fromkeys(found)
                return found

            try:
                opened = open_sum(context, first, partial(ask, context=context), self._refuse)
                return context.code.decode(opened.total), opened.survivors
            except FedLDError as error:
                reasons.append(str(error))
                sites = [site for site in sites if site in answered]
        why = "; ".join(dict.fromkeys([*reasons, *(f"{s}: {w}" for s, w in self._problems.items())]))
        raise FedLDError(
            f"round {held.described.round}: the secure sum '{held.described.purpose}' was not opened: "
            f"{why or f'{len(sites)} sites keep a result, {LEAST_SITES} are needed'}"
        )

    def _keys(self, sites: Sequence[str]) -> dict[str, str]:
        return {site: self.identities[site] for site in sites}

    def _ask(
        self,
        context: SumContext,
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
        vector = context.code.length * context.code.dtype.itemsize
        most = 3 * vector + SPARE  # a grid counts pieces on the wire and the array made of them
        patience = Patience(limit, max(context.threshold, LEAST_SITES), grace)
        replies = exchange(self.sites.grid, contents, "train.secure", patience, most)
        messages: dict[str, bytes] = {}
        for site in answers:
            try:
                messages[site] = _message(replies[nodes[site]] if site in nodes else None)
            except FedLDError as error:
                self._refuse(site, str(error))
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

    def _written(self, held: HeldResult) -> tuple[np.ndarray, tuple[str, ...]] | None:
        """Read a sum that was opened before the server stopped, of the same model and settings."""
        try:
            with np.load(self._file(held), allow_pickle=False) as found:
                if str(found["held"]) != _described(held):
                    return None
                return found["total"], tuple(str(site) for site in found["survivors"])
        except (OSError, ValueError, KeyError):
            return None

    def _write(self, held: HeldResult, total: np.ndarray, survivors: tuple[str, ...]) -> None:
        """Write an opened sum; those of earlier rounds are no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob("round*.npz"):
            if not file.name.startswith(f"round{held.round}-"):
                file.unlink()
        with self._file(held).open("wb") as written:
            np.savez(written, total=total, survivors=np.array(survivors), held=np.array(_described(held)))


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
