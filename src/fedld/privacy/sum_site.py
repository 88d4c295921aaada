"""A site's side of a secure sum (Bonawitz et al. 2017, against a malicious server), as a value.

Each step takes the server's answer and gives the next value and the next message:

    begin -> share_keys -> mask -> check -> unmask

The site adds to its vector a mask from its own seed b and, with every peer, a mask that one adds and the
other subtracts. In the end each site gives, for each peer, its share of b (the peer's vector counts) or of
the key of the pairwise masks (the peer dropped out). Both together would open that peer's vector, so the
choice is made once: all survivors must have signed one list, and the journal remembers it.
"""

import secrets
from dataclasses import dataclass, field, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedld.errors import FedLDError
from fedld.privacy.checks import checked_keys, require_context, require_sites
from fedld.privacy.context import SumContext, public_key
from fedld.privacy.fixed_point import Integers
from fedld.privacy.journal import Journal
from fedld.privacy.masks import add_mask, agreed, derived_key, public_half, seal, unseal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    SecureMessage,
    ShareDelivery,
    ShareKeys,
    SurvivorList,
    SurvivorProof,
    Unmask,
)
from fedld.privacy.shamir import SHARE_BYTES, split


@dataclass(frozen=True)
class PeerShares:
    """This site's shares of a peer's secrets."""

    seed: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class SumSite:
    """One site in one secure sum, after its last step.

    `keys` are the checked advertisements (who shares secrets with whom), `shares` what this site holds of its
    peers' secrets (itself included), `survivors` the list that it signed.
    """

    context: SumContext
    site: str
    envelope_secret: bytes = field(repr=False)
    mask_secret: bytes = field(repr=False)
    seed: bytes = field(repr=False)
    last: str = "begin"
    keys: dict[str, AdvertiseKeys] = field(default_factory=dict)
    own_shares: PeerShares | None = field(default=None, repr=False)
    shares: dict[str, PeerShares] = field(default_factory=dict, repr=False)
    survivors: tuple[str, ...] = ()

    @classmethod
    def begin(
        cls, context: SumContext, site: str, identity: Ed25519PrivateKey, journal: Journal
    ) -> tuple["SumSite", AdvertiseKeys]:
        """Fresh keys for this sum, and message 1.

        Args:
            context: the sum, as this site sees it.
            site: this site's name.
            identity: this site's long-lived key.
            journal: this site's journal.

        Raises:
            FedLDError: the site is not a participant, or has begun this sum before.
        """
        if context.participants.get(site) != public_key(identity):
            raise FedLDError(f"site '{site}' is not a participant of this sum with its own key")
        journal.take(context.digest, "begin", f"attempt {context.attempt}")
        state = cls(
            context=context,
            site=site,
            envelope_secret=secrets.token_bytes(32),
            mask_secret=secrets.token_bytes(32),
            seed=secrets.token_bytes(32),
        )
        keys = (public_half(state.envelope_secret), public_half(state.mask_secret), state._commitment)
        return state, AdvertiseKeys(
            context=context.digest,
            site=site,
            envelope_key=keys[0],
            mask_key=keys[1],
            commitment=keys[2],
            signature=context.sign(identity, "keys", site, *keys),
        )

    def share_keys(self, answer: KeyList, journal: Journal) -> tuple["SumSite", ShareKeys]:
        """Check everybody's keys, and share this site's secrets among them: message 2."""
        self._expect("begin", answer)
        keys = checked_keys(self.context, answer.keys)
        if self.site not in keys or keys[self.site].mask_key != public_half(self.mask_secret):
            raise FedLDError("the list of keys does not hold this site's own keys")
        journal.take(self.context.digest, "share", f"keys of {', '.join(sorted(keys))}")
        sites = len(self.context.sites)
        seeds = split(self.seed, self.context.threshold, sites)
        masks = split(self.mask_secret, self.context.threshold, sites)
        envelopes = {}
        state = replace(self, last="share", keys=keys)
        for peer in sorted(set(keys) - {self.site}):
            at = self.context.point(peer) - 1
            key, about = state._envelope(self.site, peer, peer)
            envelopes[peer] = seal(key, seeds[at] + masks[at], about).hex()
        at = self.context.point(self.site) - 1
        state = replace(state, own_shares=PeerShares(seeds[at], masks[at]))
        return state, ShareKeys(context=self.context.digest, site=self.site, envelopes=envelopes)

    def mask(
        self, answer: ShareDelivery, vector: Integers, journal: Journal
    ) -> tuple["SumSite", MaskedInput]:
        """Open the peers' shares, and mask this site's integers: message 3.

        Raises:
            FedLDError: an envelope is not for this site, or too few peers are left.
        """
        self._expect("share", answer)
        context = self.context
        peers = sorted(answer.envelopes)
        if self.site in peers or not set(peers) <= set(self.keys):
            raise FedLDError("shares were delivered from a site that advertised no keys")
        require_sites(context, [*peers, self.site], "shared their keys")
        if vector.shape != (context.code.length,) or vector.dtype != context.code.dtype:
            raise FedLDError("the vector was not encoded for this sum")
        assert self.own_shares is not None
        shares = {self.site: self.own_shares}
        for peer in peers:
            key, about = self._envelope(peer, self.site, peer)
            opened = unseal(key, bytes.fromhex(answer.envelopes[peer]), about)
            shares[peer] = PeerShares(opened[:SHARE_BYTES], opened[SHARE_BYTES:])
        journal.take(context.digest, "input", f"masked with {', '.join(peers)}")
        masked = vector.copy()
        add_mask(masked, self_mask_key(self.seed, context))
        for peer in peers:
            secret = agreed(self.mask_secret, self.keys[peer].mask_key)
            add_mask(masked, pair_mask_key(secret, context, self.site, peer), subtract=self.site > peer)
        state = replace(self, last="input", shares=shares)
        return state, MaskedInput(context=context.digest, site=self.site, vector=masked)

    def check(
        self, answer: SurvivorList, identity: Ed25519PrivateKey, journal: Journal
    ) -> tuple["SumSite", ConsistencyCheck]:
        """Sign the list of survivors, once: message 4.

        Raises:
            FedLDError: the list is too short, not sorted, names a site twice or one that shared no keys,
                leaves this site out, or another list was signed before.
        """
        self._expect("input", answer)
        survivors = answer.survivors
        if list(survivors) != sorted(set(survivors)):
            raise FedLDError("the list of survivors is not sorted or names a site twice")
        if self.site not in survivors or not set(survivors) <= set(self.shares):
            raise FedLDError("the list of survivors leaves this site out or names one that shared no keys")
        require_sites(self.context, survivors, "sent a vector")
        journal.take(self.context.digest, "survivors", ", ".join(survivors))
        state = replace(self, last="survivors", survivors=survivors)
        return state, ConsistencyCheck(
            context=self.context.digest,
            site=self.site,
            survivors=survivors,
            signature=self.context.sign(identity, "survivors", *survivors),
        )

    def unmask(self, answer: SurvivorProof, journal: Journal) -> tuple["SumSite", Unmask]:
        """One kind of share for every peer, after enough survivors signed the same list: message 5.

        Raises:
            FedLDError: a signature is of another list, there are too few, or this site has helped to open
                a sum of this round before.
        """
        self._expect("survivors", answer)
        if not set(answer.signatures) <= set(self.survivors):
            raise FedLDError("the list of survivors is signed by a site that is not on it")
        require_sites(self.context, answer.signatures, "signed the list of survivors")
        for site, signature in answer.signatures.items():
            self.context.verify(site, signature, "survivors", *self.survivors)
        if journal.detail(self.context.digest, "survivors") != ", ".join(self.survivors):
            raise FedLDError("the journal does not have the list of survivors that this site signed")
        dropped = sorted(set(self.shares) - set(self.survivors))
        # A site helps to open one attempt of a round: sums over other survivors differ by single vectors. To
        # open two, more than a third of the sites would have to help with both.
        journal.take(self.context.contribution, "opening", f"sum {self.context.digest}")
        state = replace(self, last="unmask", shares={}, own_shares=None)
        return state, Unmask(
            context=self.context.digest,
            site=self.site,
            seed_shares={peer: self.shares[peer].seed.hex() for peer in self.survivors},
            key_shares={peer: self.shares[peer].key.hex() for peer in dropped},
        )

    @property
    def _commitment(self) -> str:
        return seed_commitment(self.seed, self.context)

    def _expect(self, last: str, answer: SecureMessage) -> None:
        """Refuse an answer out of order or of another sum."""
        if self.last != last:
            raise FedLDError(f"a {type(answer).__name__} came out of order, after the step '{self.last}'")
        require_context(self.context, answer)

    def _envelope(self, sender: str, recipient: str, peer: str) -> tuple[bytes, bytes]:
        """Key and associated data of an envelope between this site and a peer."""
        secret = agreed(self.envelope_secret, self.keys[peer].envelope_key)
        keys = (self.keys[sender].envelope_key, self.keys[recipient].envelope_key)
        key = derived_key(secret, self.context.digest, "envelope", sender, recipient, *keys)
        return key, f"{self.context.digest} {sender} {recipient}".encode()


def self_mask_key(seed: bytes, context: SumContext) -> bytes:
    """Key of the mask that only a site itself adds."""
    return derived_key(seed, context.digest, "self mask")


def seed_commitment(seed: bytes, context: SumContext) -> str:
    """What a site publishes of its self seed, so that a wrong share is noticed when the seed is recovered."""
    return derived_key(seed, context.digest, "commitment").hex()


def pair_mask_key(secret: bytes, context: SumContext, one: str, other: str) -> bytes:
    """Key of the mask that the first of two sites adds and the second subtracts."""
    return derived_key(secret, context.digest, "pair mask", *sorted((one, other)))
