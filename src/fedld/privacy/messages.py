"""The messages of secure sums and Gram matrices: a site's to the server, and the server's answers.

    site -> server     server -> sites     what it is for
    AdvertiseKeys      KeyList             fresh public keys, signed with the pinned identity
    ShareKeys          ShareDelivery       shares of the site's secrets, encrypted for each peer
    MaskedInput        SurvivorList        the masked vector; then who sent one
    ConsistencyCheck   SurvivorProof       the list of survivors, signed; then all signatures
    Unmask             (the sum)           for every peer one kind of share

    GramKey            GramKeyList         a fresh public key, signed with the pinned identity
    GramShares         GramDelivery        shares of the site's sketch, encrypted for each peer
    GramProducts       GramOpening         shares of all inner products, signed

Every field is bounded, unknown fields are refused, and nothing is unpickled: a message is one line of JSON,
followed by the vector or the envelopes of a Gram matrix where there are any.
"""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedld.errors import FedLDError, printable
from fedld.privacy.context import MOST_SITES, SITE, SecureContext, SumContext
from fedld.privacy.fixed_point import Integers
from fedld.privacy.masks import NONCE_BYTES
from fedld.privacy.shamir import SHARE_BYTES
from fedld.registry import first_problem

MOST_JSON = 1 << 20  # bytes of a message beside its vector
ENVELOPE_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + 16

SiteName = Annotated[str, Field(pattern=SITE)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
ShareHex = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SHARE_BYTES}}}$")]
Envelope = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * ENVELOPE_BYTES}}}$")]
SiteNames = Annotated[tuple[SiteName, ...], Field(max_length=MOST_SITES)]
STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True)
class AdvertiseKeys:
    """Message 1: a site's fresh public keys.

    `envelope_key` encrypts shares, `mask_key` makes pairwise masks (X25519 both), `commitment` fixes the self
    seed; the signature is of all three in the context.
    """

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    envelope_key: Hex32
    mask_key: Hex32
    commitment: Hex32
    signature: Signature

    @property
    def signed(self) -> tuple[str, ...]:
        """What the signature is of, beside the context and the site's name."""
        return self.envelope_key, self.mask_key, self.commitment


@dataclass(frozen=True, kw_only=True)
class KeyList:
    """Answer to message 1: the advertisements of all sites that sent one."""

    __pydantic_config__ = STRICT
    context: Hex32
    keys: Annotated[tuple[AdvertiseKeys, ...], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class ShareKeys:
    """Message 2: for each peer an envelope with its shares of this site's self seed and mask key."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    envelopes: Annotated[dict[SiteName, Envelope], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class ShareDelivery:
    """Answer to message 2: the envelopes for one site, by sender."""

    __pydantic_config__ = STRICT
    context: Hex32
    envelopes: Annotated[dict[SiteName, Envelope], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class MaskedInput:
    """Message 3: the site's integers plus all masks; the vector travels after the line of JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    context: Hex32
    site: SiteName
    vector: Annotated[Any, Field(exclude=True)] = None


@dataclass(frozen=True, kw_only=True)
class SurvivorList:
    """Answer to message 3: the sites that sent a masked vector, sorted."""

    __pydantic_config__ = STRICT
    context: Hex32
    survivors: SiteNames


@dataclass(frozen=True, kw_only=True)
class ConsistencyCheck:
    """Message 4: a survivor's signature of the list of survivors."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    survivors: SiteNames
    signature: Signature


@dataclass(frozen=True, kw_only=True)
class SurvivorProof:
    """Answer to message 4: the signatures of the survivors that still answer."""

    __pydantic_config__ = STRICT
    context: Hex32
    signatures: Annotated[dict[SiteName, Signature], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class Unmask:
    """Message 5: shares of the survivors' self seeds, and of the mask keys of those that dropped out."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    seed_shares: Annotated[dict[SiteName, ShareHex], Field(max_length=MOST_SITES)]
    key_shares: Annotated[dict[SiteName, ShareHex], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class GramKey:
    """Message 1 of a secure Gram matrix: a site's fresh public key (X25519), signed in the context."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    envelope_key: Hex32
    signature: Signature

    @property
    def signed(self) -> tuple[str, ...]:
        """What the signature is of, beside the context and the site's name."""
        return (self.envelope_key,)


@dataclass(frozen=True, kw_only=True)
class GramKeyList:
    """Answer to message 1: the keys of all participants."""

    __pydantic_config__ = STRICT
    context: Hex32
    keys: Annotated[tuple[GramKey, ...], Field(max_length=MOST_SITES)]


@dataclass(frozen=True, kw_only=True)
class GramShares:
    """Message 2: for each peer an envelope with shares of the sketch and of zeros, after the line of JSON."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    envelopes: dict[SiteName, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GramDelivery:
    """Answer to message 2: the envelopes for one site, by sender."""

    __pydantic_config__ = STRICT
    context: Hex32
    envelopes: dict[SiteName, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GramProducts:
    """Message 3: a site's shares of all inner products, signed; 32-bit little-endian, hexadecimal."""

    __pydantic_config__ = STRICT
    context: Hex32
    site: SiteName
    products: Annotated[str, Field(pattern=r"^([0-9a-f]{16})+$", max_length=20_000)]
    signature: Signature


@dataclass(frozen=True, kw_only=True)
class GramOpening:
    """Answer to message 3: everybody's shares, from which each site opens the matrix itself."""

    __pydantic_config__ = STRICT
    context: Hex32
    products: Annotated[tuple[GramProducts, ...], Field(max_length=MOST_SITES)]


SiteMessage = (
    AdvertiseKeys | ShareKeys | MaskedInput | ConsistencyCheck | Unmask | GramKey | GramShares | GramProducts
)
"""What a site sends."""

ServerMessage = (
    KeyList | ShareDelivery | SurvivorList | SurvivorProof | GramKeyList | GramDelivery | GramOpening
)
"""What the server answers."""

SecureMessage = SiteMessage | ServerMessage
M = TypeVar("M", bound=SecureMessage)


def to_bytes(message: SecureMessage) -> bytes:
    """A message as one line of JSON, followed by the bytes of its vector or envelopes.

    >>> message = SurvivorList(context="0" * 64, survivors=("a", "b", "c"))
    >>> from_bytes(SurvivorList, to_bytes(message)) == message
    True
    """
    if isinstance(message, MaskedInput):
        vector: Integers = message.vector
        return _line({"context": message.context, "site": message.site}) + vector.tobytes()
    if isinstance(message, GramShares | GramDelivery):
        head = {"context": message.context, "envelopes": dict.fromkeys(message.envelopes, "")}
        if isinstance(message, GramShares):
            head["site"] = message.site
        return _line(head) + b"".join(message.envelopes.values())
    return _line(asdict(message))


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def from_bytes(kind: type[M], content: bytes, context: SecureContext | None = None) -> M:
    """The message in some bytes, checked; a vector's length and type are the context's.

    Raises:
        FedLDError: the bytes are no such message.
    """
    end = content.find(b"\n", 0, MOST_JSON)
    try:
        message: M = _adapter(kind).validate_json(content[: max(end, 0)])  # type: ignore[arg-type]
    except ValidationError as error:
        problem = f"a {kind.__name__} message is malformed: {first_problem(error)}"
        raise FedLDError(printable(problem)) from None
    rest = memoryview(content)[end + 1 :]
    if isinstance(message, MaskedInput):
        if (
            not isinstance(context, SumContext)
            or len(rest) != context.code.length * context.code.dtype.itemsize
        ):
            raise FedLDError("a masked vector does not have the length of this sum")
        return replace(message, vector=np.frombuffer(rest, context.code.dtype))
    if isinstance(message, GramShares | GramDelivery):
        return replace(message, envelopes=_cut(rest, list(message.envelopes)))
    if len(rest):
        raise FedLDError(f"a {kind.__name__} message has bytes after its end")
    return message


def _cut(content: memoryview, names: list[str]) -> dict[str, bytes]:
    """Envelopes of one size, one after the other."""
    size, over = divmod(len(content), max(len(names), 1))
    if over or len(names) > MOST_SITES:
        raise FedLDError("the envelopes of a message are not all of one size")
    return {name: bytes(content[k * size : (k + 1) * size]) for k, name in enumerate(names)}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # takes milliseconds to make


def masked_vector(message: MaskedInput, context: SumContext) -> Integers:
    """The vector of a masked input, of the type and length that the context says."""
    vector = message.vector
    if not isinstance(vector, np.ndarray) or vector.dtype != context.code.dtype:
        raise FedLDError(f"the masked vector of site '{message.site}' is not of {context.code.bits} bits")
    if vector.shape != (context.code.length,):
        raise FedLDError(f"the masked vector of site '{message.site}' does not have the length of this sum")
    return vector
