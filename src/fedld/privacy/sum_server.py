"""The server's side of a secure sum, as a value: it relays keys and shares, and opens the sum.

Each step takes what the sites sent and gives the next value and the answer to the sites. Sites that sent
nothing have dropped out; fewer than the threshold end the sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from fedld.errors import FedLDError
from fedld.privacy.checks import by_sender, checked_keys
from fedld.privacy.context import SumContext
from fedld.privacy.fixed_point import Integers
from fedld.privacy.masks import add_mask, agreed, public_half
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    ShareDelivery,
    ShareKeys,
    SurvivorList,
    SurvivorProof,
    Unmask,
    masked_vector,
)
from fedld.privacy.shamir import recover
from fedld.privacy.sum_site import pair_mask_key, seed_commitment, self_mask_key


@dataclass(frozen=True)
class OpenedSum:
    """What the server learns: the sum of the survivors' integers, and who they are."""

    total: Integers
    survivors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SumServer:
    """The server in one secure sum, after its last step.

    `shared` are the sites that shared their keys, `survivors` those that also sent a vector, `masked` the sum
    of these vectors.
    """

    context: SumContext
    last: str = "begin"
    keys: dict[str, AdvertiseKeys] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()
    masked: Integers | None = field(default=None, repr=False)

    def list_keys(self, messages: Iterable[AdvertiseKeys]) -> tuple["SumServer", KeyList]:
        """Check all advertised keys and pass them on."""
        self._expect("begin", "keys")
        keys = checked_keys(self.context, messages)
        answer = KeyList(context=self.context.digest, keys=tuple(keys[site] for site in sorted(keys)))
        return replace(self, last="keys", keys=keys), answer

    def deliver(self, messages: Iterable[ShareKeys]) -> tuple["SumServer", dict[str, ShareDelivery]]:
        """Sort the envelopes by who can open them."""
        self._expect("keys", "shares")
        by_site = by_sender(self.context, messages, self.keys, "shared their keys")
        for site, message in by_site.items():
            if set(message.envelopes) != set(self.keys) - {site}:
                raise FedLDError(f"site '{site}' did not make one envelope for each of its peers")
        shared = tuple(sorted(by_site))
        answers = {}
        for site in shared:
            envelopes = {peer: by_site[peer].envelopes[site] for peer in shared if peer != site}
            answers[site] = ShareDelivery(context=self.context.digest, envelopes=envelopes)
        return replace(self, last="shares", shared=shared), answers

    def collect(self, messages: Iterable[MaskedInput]) -> tuple["SumServer", SurvivorList]:
        """Add the masked vectors; those who sent one are the survivors."""
        self._expect("shares", "a masked vector")
        by_site = by_sender(self.context, messages, self.shared, "sent a vector")
        masked = np.zeros(self.context.code.length, self.context.code.dtype)
        for message in by_site.values():
            masked += masked_vector(message, self.context)
        survivors = tuple(sorted(by_site))
        answer = SurvivorList(context=self.context.digest, survivors=survivors)
        return replace(self, last="inputs", masked=masked, survivors=survivors), answer

    def confirm(self, messages: Iterable[ConsistencyCheck]) -> tuple["SumServer", SurvivorProof]:
        """Check that all signed the same list, and pass their signatures on."""
        self._expect("inputs", "a signed list of survivors")
        by_site = by_sender(self.context, messages, self.survivors, "signed the list of survivors")
        for site, message in by_site.items():
            if message.survivors != self.survivors:
                raise FedLDError(f"site '{site}' signed another list of survivors")
            self.context.verify(site, message.signature, "survivors", *self.survivors)
        signatures = {site: by_site[site].signature for site in sorted(by_site)}
        return replace(self, last="signed"), SurvivorProof(context=self.context.digest, signatures=signatures)

    def open(self, messages: Iterable[Unmask]) -> tuple["SumServer", OpenedSum]:
        """Recover the masks that did not cancel, and take them away.

        Raises:
            FedLDError: too few sites gave shares, or their shares do not give what a site advertised.
        """
        self._expect("signed", "a share")
        by_site = by_sender(self.context, messages, self.survivors, "gave their shares")
        dropped = sorted(set(self.shared) - set(self.survivors))
        for site, message in by_site.items():
            if set(message.seed_shares) != set(self.survivors) or set(message.key_shares) != set(dropped):
                raise FedLDError(f"site '{site}' did not give exactly one share of every peer")
        assert self.masked is not None
        total = self.masked.copy()
        points = {self.context.point(site): message for site, message in by_site.items()}
        for site in self.survivors:
            shares = {x: bytes.fromhex(message.seed_shares[site]) for x, message in points.items()}
            add_mask(total, self_mask_key(self._seed(site, shares), self.context), subtract=True)
        for site in dropped:
            shares = {x: bytes.fromhex(message.key_shares[site]) for x, message in points.items()}
            self._take_pair_masks(total, site, self._mask_secret(site, shares))
        return replace(self, last="open", masked=None), OpenedSum(total, self.survivors)

    def _seed(self, site: str, shares: dict[int, bytes]) -> bytes:
        """A survivor's self seed, checked against its commitment."""
        seed = recover(shares, self.context.threshold)
        if seed_commitment(seed, self.context) != self.keys[site].commitment:
            raise FedLDError(f"the shares of the self seed of site '{site}' do not give what it committed to")
        return seed

    def _mask_secret(self, site: str, shares: dict[int, bytes]) -> bytes:
        """The mask key of a site that dropped out, checked against its public half."""
        secret = recover(shares, self.context.threshold)
        if public_half(secret) != self.keys[site].mask_key:
            raise FedLDError(f"the shares of the mask key of site '{site}' do not give what it advertised")
        return secret

    def _take_pair_masks(self, total: Integers, dropped: str, secret: bytes) -> None:
        """Take away the masks that survivors added for a site that sent no vector."""
        for survivor in self.survivors:
            common = agreed(secret, self.keys[survivor].mask_key)
            key = pair_mask_key(common, self.context, dropped, survivor)
            add_mask(total, key, subtract=survivor < dropped)

    def _expect(self, last: str, what: str) -> None:
        if self.last != last:
            raise FedLDError(f"{what} came when the sum was already at '{self.last}', so it does not count")
