"""Checks that both sides of every secure computation make of messages."""

from collections.abc import Collection, Iterable
from typing import TypeVar

from fedld.errors import FedLDError
from fedld.privacy.context import LEAST_SITES, SecureContext
from fedld.privacy.messages import AdvertiseKeys, GramKey, SecureMessage, SiteMessage

A = TypeVar("A", AdvertiseKeys, GramKey)
S = TypeVar("S", bound=SiteMessage)


def checked_keys(context: SecureContext, advertised: Iterable[A]) -> dict[str, A]:
    """Advertised keys by site, every signature checked against the pinned keys.

    Raises:
        FedLDError: a site is unknown, twice there or not signed by its pinned key; a key is used twice.
    """
    keys: dict[str, A] = {}
    for message in advertised:
        require_context(context, message)
        if message.site not in context.participants:
            raise FedLDError(f"site '{message.site}' advertised keys but is not a participant")
        if message.site in keys:
            raise FedLDError(f"site '{message.site}' advertised keys twice")
        context.verify(message.site, message.signature, "keys", message.site, *message.signed)
        keys[message.site] = message
    every = [part for message in keys.values() for part in message.signed]
    if len(set(every)) < len(every):
        raise FedLDError("two of the advertised keys are the same")
    require_sites(context, keys, "advertised their keys")
    return keys


def require_context(context: SecureContext, message: SecureMessage) -> None:
    """Refuse a message of another sum: another run, round, model, settings or list of participants."""
    if message.context != context.digest:
        raise FedLDError(
            f"a {type(message).__name__} message belongs to another computation: its run, round, model, "
            "settings or participants are not those of this one"
        )


def require_sites(context: SecureContext, sites: Iterable[str], did: str) -> None:
    """Refuse to go on with fewer sites than the threshold, or than three."""
    count = len(set(sites))
    least = max(context.threshold, LEAST_SITES)
    if count < least:
        raise FedLDError(
            f"only {count} of {len(context.sites)} sites {did}; {least} are needed, so nothing is opened"
        )


def by_sender(
    context: SecureContext, messages: Iterable[S], expected: Collection[str], did: str
) -> dict[str, S]:
    """Messages by site: of this computation, from sites still in it, one each, and enough of them."""
    by_site: dict[str, S] = {}
    for message in messages:
        require_context(context, message)
        if message.site not in expected:
            raise FedLDError(f"site '{message.site}' has left this computation, or never was in it")
        if message.site in by_site:
            raise FedLDError(f"site '{message.site}' sent the same message twice")
        by_site[message.site] = message
    require_sites(context, by_site, did)
    return by_site
