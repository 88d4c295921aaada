"""A secure computation as numbered messages, for whatever carries bytes between a server and its sites.

A site's message 1 opens the computation. Message n of a site, for n > 1, answers what the server made of all
sites' messages n - 1. `open_sum` is the server's side, `begin_sum` and `answer_sum` are a site's. A site that
says nothing is absent from the carrier's answer, and the computation goes on if enough sites are left.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedld.errors import FedLDError
from fedld.privacy.checks import require_context
from fedld.privacy.context import SecureContext, SumContext
from fedld.privacy.fixed_point import Integers
from fedld.privacy.journal import Journal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
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

S = TypeVar("S", bound=SiteMessage)
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
        least: fewest survivors with which it signs, by its own policy.
    """

    site: str
    identity: Ed25519PrivateKey = field(repr=False)
    journal: Journal
    vector: Callable[[SumContext], Integers]
    least: int = 0


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
    adverts = [one for one in _read(AdvertiseKeys, first, context, refuse) if _signed(one, context, refuse)]
    server, keys = server.list_keys(adverts)
    second = ask(2, dict.fromkeys((one.site for one in keys.keys), to_bytes(keys)))
    server, deliveries = server.deliver(_read(ShareKeys, second, context, refuse))
    third = ask(3, {site: to_bytes(delivery) for site, delivery in deliveries.items()})
    server, survivors = server.collect(_read(MaskedInput, third, context, refuse))
    fourth = ask(4, dict.fromkeys(survivors.survivors, to_bytes(survivors)))
    server, proof = server.confirm(_read(ConsistencyCheck, fourth, context, refuse))
    fifth = ask(5, dict.fromkeys(proof.signatures, to_bytes(proof)))
    return server.open(_read(Unmask, fifth, context, refuse))[1]


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


def _signed(advert: AdvertiseKeys, context: SecureContext, refuse: Refuse) -> bool:
    try:
        context.verify(advert.site, advert.signature, "keys", advert.site, *advert.signed)
    except FedLDError as error:
        refuse(advert.site, str(error))
        return False
    return True


def _require_least(side: SiteSide, sites: Iterable[str], does: str) -> None:
    count = len(list(sites))
    if count < side.least:
        raise FedLDError(f"its policy refuses this: it {does} with at least {side.least} sites, not {count}")


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
