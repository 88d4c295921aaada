"""What a secure sum is about, and who takes part: everything that a signature is bound to.

Every site makes the context itself, from the model it received, the settings it was given and the keys it has
pinned; only its digest is compared. If a server tells two sites different things, their digests differ and
no signature of one is valid for the other.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedld.errors import FedLDError
from fedld.privacy.fixed_point import FixedPoint
from fedld.privacy.shamir import least_shares

VERSION = 1
"""Version of the protocol; other versions are refused."""

SITE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""What a site's name may be."""

LEAST_SITES = 3
"""Sites in a sum: of two sites, each learns the other's vector from the sum."""

MOST_SITES = 200
"""Sites of one sum: every site exchanges keys with every other."""


def framed(purpose: str, *parts: str | int | bytes) -> bytes:
    """Bytes to hash or sign: every part with its length before it, so that no two lists give the same bytes.

    >>> framed("x", "ab", "c") == framed("x", "a", "bc")
    False
    """
    framed = b""
    for part in ("fedld", VERSION, purpose, *parts):
        encoded = part if isinstance(part, bytes) else str(part).encode()
        framed += len(encoded).to_bytes(8, "big") + encoded
    return framed


def digest(purpose: str, *parts: str | int | bytes) -> str:
    """SHA-256 of framed parts, in hexadecimal."""
    return hashlib.sha256(framed(purpose, *parts)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SumContext:
    """All that the sites of one secure sum must agree on.

    Args:
        run: name of the run.
        round: number of the round.
        purpose: which sum of the round: update, losses, ...
        attempt: counts repetitions of a sum that failed before any site sent its vector.
        model: SHA-256 of the model that the round starts from, in hexadecimal.
        settings: SHA-256 of the run's settings, in hexadecimal.
        participants: identity keys (Ed25519, hexadecimal) of the sites by name.
        code: how vectors become integers.
    """

    run: str
    round: int
    purpose: str
    attempt: int
    model: str
    settings: str
    participants: Mapping[str, str]
    code: FixedPoint

    def __post_init__(self) -> None:
        if len(self.participants) < LEAST_SITES:
            raise FedLDError(
                f"a secure sum needs at least {LEAST_SITES} sites, not {len(self.participants)}: with fewer, "
                "a site's vector follows from the sum"
            )
        if len(self.participants) > MOST_SITES:
            raise FedLDError(f"a secure sum takes at most {MOST_SITES} sites, not {len(self.participants)}")
        if len(set(self.participants.values())) < len(self.participants):
            raise FedLDError("two participants of a secure sum have the same identity key")
        if self.code.sites != len(self.participants):
            raise FedLDError(f"the fixed point is for {self.code.sites} sites, not {len(self.participants)}")
        for name, key in self.participants.items():
            check_peer(name, key)
        if self.round < 0 or self.attempt < 0:
            raise FedLDError("rounds and attempts are numbered from 0")

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The participants' names, sorted."""
        return tuple(sorted(self.participants))

    @property
    def threshold(self) -> int:
        """How many sites must stay until the end."""
        return least_shares(len(self.participants))

    def point(self, site: str) -> int:
        """Where a site's Shamir shares are evaluated: its place among the sorted names, from 1."""
        return self.sites.index(site) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        code = self.code
        segments = [(s.name, s.length, s.bound.hex(), s.weighted) for s in code.segments]
        return digest(
            "context",
            self.run,
            self.round,
            self.purpose,
            self.attempt,
            self.model,
            self.settings,
            json.dumps([(name, self.participants[name]) for name in self.sites]),
            json.dumps([code.bits, code.sites, code.largest_weight, segments]),
        )

    def sign(self, identity: Ed25519PrivateKey, purpose: str, *parts: str | int | bytes) -> str:
        """A site's signature of some parts within this context, in hexadecimal."""
        return identity.sign(framed(purpose, self.digest, *parts)).hex()

    def verify(self, site: str, signature: str, purpose: str, *parts: str | int | bytes) -> None:
        """Refuse a signature that is not the site's, or not of these parts in this context."""
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.participants[site]))
        try:
            key.verify(bytes.fromhex(signature), framed(purpose, self.digest, *parts))
        except InvalidSignature:
            raise FedLDError(
                f"the signature of site '{site}' is not valid here: its pinned key, the model, the settings "
                "or the list of participants is another one"
            ) from None


def public_key(identity: Ed25519PrivateKey) -> str:
    """The public half of an identity, in hexadecimal."""
    return identity.public_key().public_bytes_raw().hex()


def check_peer(name: str, key: str) -> None:
    """Refuse a name that is none, or a key that is no 32 bytes in hexadecimal."""
    if not re.match(SITE, name):
        raise FedLDError(f"a peer's name has letters, digits, '.', '_' and '-' only, unlike '{name[:80]}'")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise FedLDError(f"the key of peer '{name}' is not 64 hexadecimal digits")


def read_peers(file: Path) -> dict[str, str]:
    """The pinned identity keys of `peers.toml`, by site.

    The file has one table, `[peers]`, of names and Ed25519 public keys in hexadecimal.

    Raises:
        FedLDError: the file cannot be read, or has anything else in it: no pins, no secure round.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FedLDError(f"the pinned keys in '{file}' cannot be read: {error}") from None
    peers = content.get("peers")
    if set(content) != {"peers"} or not isinstance(peers, dict) or not peers:
        raise FedLDError(f"'{file}' needs exactly one table, [peers], with a key for every site")
    for name, key in peers.items():
        check_peer(name, key if isinstance(key, str) else "")
    return peers


def pinned(peers: Mapping[str, str], sites: list[str]) -> dict[str, str]:
    """The pinned keys of a round's sites.

    Raises:
        FedLDError: a site is named twice, or has no pinned key.
    """
    if len(set(sites)) < len(sites):
        raise FedLDError("a site is named twice among the participants")
    for site in sites:
        if site not in peers:
            raise FedLDError(
                f"site '{site}' has no pinned key in peers.toml, so there is no secure round with it"
            )
    return {site: peers[site] for site in sorted(sites)}
