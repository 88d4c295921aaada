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
from typing import ClassVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedld.errors import FedLDError
from fedld.paths import require_regular
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

MOST_SKETCH = 1 << 16
"""Numbers of a sketch: each site sends 8 bytes of each to each peer."""


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
class SecureContext:
    """All that the sites of one secure computation must agree on.

    Args:
        run: name of the run.
        round: number of the round.
        purpose: which computation of the round: update, losses, gram, ...
        attempt: counts repetitions of one that failed before it was opened.
        model: SHA-256 of the model that the round starts from, in hexadecimal.
        settings: SHA-256 of the run's settings, in hexadecimal.
        participants: identity keys (Ed25519, hexadecimal) of the sites by name.
    """

    least_sites: ClassVar[int] = LEAST_SITES
    most_sites: ClassVar[int] = MOST_SITES

    run: str
    round: int
    purpose: str
    attempt: int
    model: str
    settings: str
    participants: Mapping[str, str]

    def __post_init__(self) -> None:
        count = len(self.participants)
        if count < self.least_sites:
            raise FedLDError(
                f"this secure computation needs at least {self.least_sites} sites, not {count}: with fewer, "
                "its result says too much of a single site"
            )
        if count > self.most_sites:
            raise FedLDError(f"this secure computation takes at most {self.most_sites} sites, not {count}")
        if len(set(self.participants.values())) < count:
            raise FedLDError("two participants of a secure computation have the same identity key")
        for name, key in self.participants.items():
            check_peer(name, key)
        if self.round < 0 or self.attempt < 0:
            raise FedLDError("rounds and attempts are numbered from 0")

    @property
    def parameters(self) -> str:
        """What a kind of computation adds to the context, as text."""
        raise NotImplementedError

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The participants' names, sorted."""
        return tuple(sorted(self.participants))

    @property
    def threshold(self) -> int:
        """How many sites must stay until the end."""
        return least_shares(len(self.participants))

    def point(self, site: str) -> int:
        """Where a site's shares are evaluated: its place among the sorted names, from 1."""
        return self.sites.index(site) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything, in hexadecimal."""
        participants = json.dumps([(name, self.participants[name]) for name in self.sites])
        return digest(
            "context",
            type(self).__name__,
            self.run,
            self.round,
            self.purpose,
            self.attempt,
            self.model,
            self.settings,
            participants,
            self.parameters,
        )

    @property
    def contribution(self) -> str:
        """What a site helps to open at most once, whatever the attempt."""
        return f"{self.run}/{self.round}/{self.purpose}"

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


@dataclass(frozen=True, kw_only=True)
class SumContext(SecureContext):
    """A secure sum.

    Args:
        code: how vectors become integers.
    """

    code: FixedPoint

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.code.sites != len(self.participants):
            raise FedLDError(f"the fixed point is for {self.code.sites} sites, not {len(self.participants)}")

    @property
    def parameters(self) -> str:
        """The fixed point."""
        code = self.code
        segments = [(s.name, s.length, s.bound.hex(), s.weighted) for s in code.segments]
        return json.dumps([code.bits, code.sites, code.largest_weight, segments])


@dataclass(frozen=True, kw_only=True)
class GramContext(SecureContext):
    """A secure Gram matrix of the sites' sketched vectors.

    Args:
        length: numbers of a sketch, k.
        dimension: numbers of a vector, d; a sketch has at most an eighth of them.
        bound: largest Euclidean length of a sketch.
    """

    least_sites: ClassVar[int] = 5
    most_sites: ClassVar[int] = 40

    length: int
    dimension: int
    bound: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.length <= min(MOST_SKETCH, self.dimension // 8):
            raise FedLDError(
                f"a sketch has at least 1 and at most {MOST_SKETCH} numbers, and at most an eighth of the "
                f"vector's {self.dimension}; {self.length} do not fit"
            )
        if not 0 < self.bound < 1e30:
            raise FedLDError(f"the bound of a sketch's length is above 0 and below 1e30, not {self.bound}")

    @property
    def parameters(self) -> str:
        """Lengths, the bound and the degree of sharing."""
        return json.dumps([self.length, self.dimension, self.bound.hex(), self.degree])

    @property
    def degree(self) -> int:
        """t: so many sites together with the server learn nothing but the Gram matrix."""
        return len(self.participants) // 4

    @property
    def threshold(self) -> int:
        """Products of shares have degree 2 t, so 2 t + 1 sites must stay until the end."""
        return 2 * self.degree + 1


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
        require_regular(file)
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # also of integers of thousands of digits
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
