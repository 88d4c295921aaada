"""A secure computation as numbered messages, for whatever carries bytes between a server and its sites.

A site's message 1 opens the computation. Message n of a site, for n > 1, answers what the server made of all
sites' messages n - 1. `open_sum` and `open_gram` are the server's side; `begin_sum`, `answer_sum`,
`begin_gram` and `answer_gram` are a site's. A site that says nothing is absent from the carrier's answer, and
the computation goes on if enough sites are left.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedld.errors import FedLDError
from fedld.privacy.checks import require_context
from fedld.privacy.context import GramContext, SecureContext, SumContext
from fedld.privacy.fixed_point import Integers
from fedld.privacy.gram import GramServer, GramSite, OpenedGram, sketch_seed
from fedld.privacy.journal import Journal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    GramDelivery,
    GramKey,
    GramKeyList,
    GramOpening,
    GramProducts,
    GramShares,
    KeyList,
    MaskedInput,
    ShareDelivery,
    ShareKeys,
    SiteMessage,
    SurvivorList,
    SurvivorProof,
    Unmask,
    from_bytes,
    to_bytes,
)
from fedld.privacy.sum_server import OpenedSum, SumServer
from fedld.privacy.sum_site import SumSite

Ask = Callable[[int, Mapping[str, bytes]], Mapping[str, bytes]]
"""(number of a message, what the server says to each site) -> the messages of the sites that answered."""

Refuse = Callable[[str, str], None]
"""(site, why its message does not count)."""

Sketcher = Callable[[GramContext, int], npt.NDArray[np.floating]]
"""(Gram matrix, seed) -> the sketch of a site's vector."""

S = TypeVar("S", bound=SiteMessage)
K = TypeVar("K", AdvertiseKeys, GramKey)
T = TypeVar("T")
BYTES_AS_HEX = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")


@dataclass(frozen=True, kw_only=True)
class SiteSide:
    """What a site has for its messages beside the state of the computation.

    Args:
        site: its name.
        identity: its long-lived key.
        journal: what it has done, on disk.
        vector: gives its integers, asked for when they are masked.
        sketch: gives the sketch of its vector, asked for when it is shared.
        least: fewest survivors with which it signs.
        bound_by: what says so, in messages.
    """

    site: str
    identity: Ed25519PrivateKey = field(repr=False)
    journal: Journal
    vector: Callable[[SumContext], Integers]
    sketch: Sketcher | None = None
    least: int = 0
    bound_by: str = "its policy"


def begin_sum(context: SumContext, side: SiteSide) -> tuple[SumSite, bytes]:
    """Give a site's message 1 of a secure sum."""
    _require_least(side, context.sites, "takes part")
    state, message = SumSite.begin(context, side.site, side.identity, side.journal)
    return state, to_bytes(message)


def answer_sum(state: SumSite, number: int, content: bytes, side: SiteSide) -> tuple[SumSite, bytes]:
    """Give a site's message 2 to 5 of a secure sum.

    Args:
        state: the site after its last message.
        number: of the message.
        content: what the server says.
        side: the site.

    Returns:
        The site after this message, and the message.

    Raises:
        FedLDError: the server's message is malformed, out of order or not acceptable.
    """
    message: SiteMessage
    match number:
        case 2:
            state, message = state.share_keys(from_bytes(KeyList, content), side.journal)
        case 3:
            delivery = from_bytes(ShareDelivery, content)
            state, message = state.mask(delivery, side.vector(state.context), side.journal)
        case 4:
            listed = from_bytes(SurvivorList, content)
            _require_least(side, set(listed.survivors), "signs a list of survivors")
            state, message = state.check(listed, side.identity, side.journal)
        case 5:
            state, message = state.unmask(from_bytes(SurvivorProof, content), side.journal)
        case _:
            raise FedLDError(f"a secure sum has no message {number}")
    return state, to_bytes(message)


def open_sum(context: SumContext, first: Mapping[str, bytes], ask: Ask, refuse: Refuse) -> OpenedSum:
    """Open a secure sum, from the sites' first messages on.

    Args:
        context: the sum, as the server sees it.
        first: message 1 of every site that sent one.
        ask: carries the further messages.
        refuse: called with every site that sent something else.

    Returns:
        The sum and the sites in it.

    Raises:
        FedLDError: too few sites are left.
    """
    server = SumServer(context=context)
    adverts = _signed(_read(AdvertiseKeys, first, context, refuse), context, refuse)
    server, keys = server.list_keys(adverts)
    second = ask(2, dict.fromkeys((one.site for one in keys.keys), to_bytes(keys)))
    server, deliveries = server.deliver(_read(ShareKeys, second, context, refuse))
    third = ask(3, {site: to_bytes(delivery) for site, delivery in deliveries.items()})
    server, survivors = server.collect(_read(MaskedInput, third, context, refuse))
    fourth = ask(4, dict.fromkeys(survivors.survivors, to_bytes(survivors)))
    server, proof = server.confirm(_read(ConsistencyCheck, fourth, context, refuse))
    fifth = ask(5, dict.fromkeys(proof.signatures, to_bytes(proof)))
    return server.open(_read(Unmask, fifth, context, refuse))[1]


def begin_gram(context: GramContext, side: SiteSide) -> tuple[GramSite, bytes]:
    """Give a site's message 1 of a secure Gram matrix."""
    _require_least(side, context.sites, "takes part")
    state, message = GramSite.begin(context, side.site, side.identity, side.journal)
    return state, to_bytes(message)


def answer_gram(state: GramSite, number: int, content: bytes, side: SiteSide) -> tuple[GramSite, bytes]:
    """Give a site's message 2 or 3 of a secure Gram matrix.

    Args:
        state: the site after its last message.
        number: of the message.
        content: what the server says.
        side: the site.

    Returns:
        The site after this message, and the message.

    Raises:
        FedLDError: the server's message is malformed, out of order or not acceptable.
    """
    message: SiteMessage
    match number:
        case 2:
            assert side.sketch is not None
            state = state.take_keys(from_bytes(GramKeyList, content))
            state, message = state.share(side.sketch(state.context, state.sketch_seed), side.journal)
        case 3:
            delivery = from_bytes(GramDelivery, content)
            state, message = state.multiply(delivery, side.identity, side.journal)
        case _:
            raise FedLDError(f"a secure Gram matrix has no message {number}")
    return state, to_bytes(message)


@dataclass(frozen=True, kw_only=True)
class GramResult:
    """What the server has of a secure Gram matrix.

    Args:
        opened: the matrix.
        opening: from which every site opens it, as bytes.
        seed: of the sketch.
    """

    opened: OpenedGram
    opening: bytes = field(repr=False)
    seed: int


def open_gram(context: GramContext, first: Mapping[str, bytes], ask: Ask, refuse: Refuse) -> GramResult:
    """Open a secure Gram matrix, from the sites' first messages on.

    Args:
        context: the matrix, as the server sees it.
        first: message 1 of every site that sent one.
        ask: carries the further messages.
        refuse: called with every site that sent something else.

    Returns:
        The matrix, and what the sites need to open it themselves.

    Raises:
        FedLDError: a participant did not share its sketch, or too few multiplied their shares.
    """
    server = GramServer(context=context)
    server, keys = server.list_keys(_signed(_read(GramKey, first, context, refuse), context, refuse))
    second = ask(2, dict.fromkeys(context.sites, to_bytes(keys)))
    server, deliveries = server.deliver(_read(GramShares, second, context, refuse))
    third = ask(3, {site: to_bytes(delivery) for site, delivery in deliveries.items()})
    server, opened, opening = server.open(_read(GramProducts, third, context, refuse))
    return GramResult(opened=opened, opening=to_bytes(opening), seed=sketch_seed(context, server.keys))


def site_opens_gram(state: GramSite, opening: bytes) -> OpenedGram:
    """Open the matrix at a site, from everybody's signed shares.

    Raises:
        FedLDError: the shares are malformed, not signed or too few.
    """
    return state.open(from_bytes(GramOpening, opening))


def _read(kind: type[S], contents: Mapping[str, bytes], context: SecureContext, refuse: Refuse) -> list[S]:
    """Messages of this computation by their true senders; others are refused, and their sites drop out."""
    messages = []
    for site, content in contents.items():
        try:
            message = from_bytes(kind, content, context)
            require_context(context, message)
            if message.site != site:
                raise FedLDError(f"it sent a message in the name of '{message.site}'")
            messages.append(message)
        except FedLDError as error:
            refuse(site, str(error))
    return messages


def _signed(adverts: Iterable[K], context: SecureContext, refuse: Refuse) -> list[K]:
    """Keys with the signature of their pinned identity; others are refused, and their sites drop out."""
    signed = []
    for advert in adverts:
        try:
            context.verify(advert.site, advert.signature, "keys", advert.site, *advert.signed)
            signed.append(advert)
        except FedLDError as error:
            refuse(advert.site, str(error))
    return signed


def _require_least(side: SiteSide, sites: Iterable[str], does: str) -> None:
    count = len(list(sites))
    if count < side.least:
        raise FedLDError(
            f"{side.bound_by} refuses this: it {does} with at least {side.least} sites, not {count}"
        )


def state_to_bytes(state: object) -> bytes:
    """Write a site's state of a computation, secrets included, for a file of the site's own."""
    return _adapter(type(state)).dump_json([state])


def state_from_bytes(kind: type[T], content: bytes) -> T:
    """Read a state that `state_to_bytes` wrote.

    Raises:
        FedLDError: the bytes are no such state.
    """
    try:
        (state,) = _adapter(kind).validate_json(content)
    except (ValidationError, ValueError):
        raise FedLDError("the state of the secure computation is damaged: no answer") from None
    return state


def _adapter(kind: type[T]) -> TypeAdapter[list[T]]:
    return TypeAdapter(list[kind], config=BYTES_AS_HEX)  # type: ignore[valid-type]
