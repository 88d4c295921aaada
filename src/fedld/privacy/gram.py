"""The Gram matrix of the sites' sketched vectors, of which nobody sees one; both sides as values.

    site:    begin -> take_keys -> share -> multiply -> open
    server:  list_keys -> deliver -> open

The sketch is public; its seed follows from the context and everybody's fresh keys, so that nobody chooses it.
Each site shares its sketch with degree t among all, every site multiplies the shares it holds, and the
products are opened. The server with t sites learns nothing beside the matrix K. All participants must have
shared; of those, m - 2 t - 1 may then drop out. The products are signed and everybody gets all of them, so
every site opens K itself and checks the coefficients that the server says follow from it.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedld.errors import FedLDError
from fedld.privacy.checks import by_sender, checked_keys, require_context
from fedld.privacy.context import LEAST_SITES, GramContext, digest, public_key
from fedld.privacy.gram_shares import (
    PRIMES,
    SCALE,
    Residues,
    open_matrix,
    pairs,
    product_shares,
    rounded,
    share_vector,
    share_zeros,
)
from fedld.privacy.journal import Journal
from fedld.privacy.masks import agreed, derived_key, public_half, seal, unseal
from fedld.privacy.messages import (
    GramDelivery,
    GramKey,
    GramKeyList,
    GramOpening,
    GramProducts,
    GramShares,
    SecureMessage,
)

Matrix = npt.NDArray[np.float64]
Coefficients = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OpenedGram:
    """The Gram matrix of the sketches, in the order of the sites' sorted names.

    Args:
        integers: of the rounded sketches, exact.
        matrix: in the vectors' units.
    """

    integers: npt.NDArray[np.int64]
    matrix: Matrix

    def among(self, places: Sequence[int]) -> "OpenedGram":
        """Give the matrix of some of the sites, by their places in it."""
        chosen = np.ix_(places, places)
        return OpenedGram(self.integers[chosen], self.matrix[chosen])

    @property
    def digest(self) -> str:
        """SHA-256 of the integers, in hexadecimal."""
        return digest("gram matrix", self.integers.astype("<i8").tobytes())


@dataclass(frozen=True, kw_only=True)
class GramSite:
    """One site in one secure Gram matrix, after its last step.

    `keys` are everybody's checked keys, `own` is what this site keeps of its own shares.
    """

    context: GramContext
    site: str
    secret: bytes = field(repr=False)
    last: str = "begin"
    keys: dict[str, GramKey] = field(default_factory=dict)
    own: bytes = field(default=b"", repr=False)

    @classmethod
    def begin(
        cls, context: GramContext, site: str, identity: Ed25519PrivateKey, journal: Journal
    ) -> tuple["GramSite", GramKey]:
        """A fresh key for this matrix: message 1.

        Raises:
            FedLDError: the site is not a participant, or has begun this computation before.
        """
        if context.participants.get(site) != public_key(identity):
            raise FedLDError(f"site '{site}' is not a participant of this Gram matrix with its own key")
        journal.take(context.digest, "begin", f"attempt {context.attempt}")
        state = cls(context=context, site=site, secret=secrets.token_bytes(32))
        key = public_half(state.secret)
        return state, GramKey(
            context=context.digest,
            site=site,
            envelope_key=key,
            signature=context.sign(identity, "keys", site, key),
        )

    def take_keys(self, answer: GramKeyList) -> "GramSite":
        """Check everybody's keys; then `sketch_seed` is known."""
        self._expect("begin", answer)
        keys = all_keys(self.context, answer.keys)
        if keys[self.site].envelope_key != public_half(self.secret):
            raise FedLDError("the list of keys does not hold this site's own key")
        return replace(self, last="keys", keys=keys)

    @property
    def sketch_seed(self) -> int:
        """Seed of the public sketch."""
        return sketch_seed(self.context, self.keys)

    def share(self, sketch: npt.NDArray[np.floating], journal: Journal) -> tuple["GramSite", GramShares]:
        """Share the sketch of this site's vector among all sites: message 2.

        Raises:
            FedLDError: the sketch is beyond its bound.
        """
        self._require("keys", "a sketch")
        context = self.context
        if sketch.shape != (context.length,):
            raise FedLDError(f"a sketch of {context.length} numbers is needed, not of shape {sketch.shape}")
        integers = rounded(sketch, context.bound)
        journal.take(context.digest, "input", "shares for all participants")
        sites = len(context.sites)
        vectors = share_vector(integers, context.degree, sites)
        zeros = share_zeros(pairs(sites), 2 * context.degree, sites)
        contents = {site: _content(vectors[k], zeros[k]) for k, site in enumerate(context.sites)}
        envelopes = {}
        for peer in context.sites:
            if peer != self.site:
                key, about = self._envelope(self.site, peer, peer)
                envelopes[peer] = seal(key, contents[peer], about)
        state = replace(self, last="share", own=contents[self.site])
        return state, GramShares(context=context.digest, site=self.site, envelopes=envelopes)

    def multiply(
        self, answer: GramDelivery, identity: Ed25519PrivateKey, journal: Journal
    ) -> tuple["GramSite", GramProducts]:
        """Multiply the shares of all pairs of sites: message 3.

        Raises:
            FedLDError: a participant's envelope is missing, one is not for this site, or this site has helped
                to open a matrix of this round before.
        """
        self._expect("share", answer)
        context = self.context
        if set(answer.envelopes) != set(context.sites) - {self.site}:
            raise FedLDError("the Gram matrix needs shares of every participant, and of nobody else")
        contents = []
        for peer in context.sites:
            if peer == self.site:
                contents.append(self.own)
            else:
                key, about = self._envelope(peer, self.site, peer)
                contents.append(unseal(key, answer.envelopes[peer], about))
        held = [_read(content, context, peer) for content, peer in zip(contents, context.sites, strict=True)]
        journal.take(context.contribution, "opening", f"Gram matrix {context.digest}")
        products = product_shares(np.stack([v for v, _ in held]), np.stack([z for _, z in held]))
        text = products.T.astype("<u4").tobytes().hex()
        state = replace(self, last="products", own=b"")
        return state, GramProducts(
            context=context.digest,
            site=self.site,
            products=text,
            signature=context.sign(identity, "products", self.site, text),
        )

    def open(self, answer: GramOpening) -> OpenedGram:
        """The matrix, opened by this site itself from everybody's signed shares."""
        self._expect("products", answer)
        return opened_gram(self.context, answer.products)

    def _expect(self, last: str, answer: SecureMessage) -> None:
        """Refuse an answer out of order or of another computation."""
        self._require(last, f"a {type(answer).__name__}")
        require_context(self.context, answer)

    def _require(self, last: str, what: str) -> None:
        if self.last != last:
            raise FedLDError(f"{what} came out of order, after the step '{self.last}'")

    def _envelope(self, sender: str, recipient: str, peer: str) -> tuple[bytes, bytes]:
        """Key and associated data of an envelope between this site and a peer."""
        secret = agreed(self.secret, self.keys[peer].envelope_key)
        ends = (self.keys[sender].envelope_key, self.keys[recipient].envelope_key)
        key = derived_key(secret, self.context.digest, "envelope", sender, recipient, *ends)
        return key, f"{self.context.digest} {sender} {recipient}".encode()


@dataclass(frozen=True, kw_only=True)
class GramServer:
    """The server in one secure Gram matrix, after its last step."""

    context: GramContext
    last: str = "begin"
    keys: dict[str, GramKey] = field(default_factory=dict)

    def list_keys(self, messages: Iterable[GramKey]) -> tuple["GramServer", GramKeyList]:
        """Check all keys and pass them on."""
        self._require("begin", "keys")
        keys = all_keys(self.context, messages)
        answer = GramKeyList(context=self.context.digest, keys=tuple(keys[site] for site in sorted(keys)))
        return replace(self, last="keys", keys=keys), answer

    def deliver(self, messages: Iterable[GramShares]) -> tuple["GramServer", dict[str, GramDelivery]]:
        """Sort the envelopes by who can open them.

        Raises:
            FedLDError: a participant sent none: try again without it.
        """
        self._require("keys", "shares")
        sites = self.context.sites
        by_site = by_sender(self.context, messages, sites, "shared their sketches")
        if missing := sorted(set(sites) - set(by_site)):
            raise FedLDError(f"site '{missing[0]}' shared no sketch; the Gram matrix begins again without it")
        for site, message in by_site.items():
            if set(message.envelopes) != set(sites) - {site}:
                raise FedLDError(f"site '{site}' did not make one envelope for each of its peers")
        answers = {}
        for site in sites:
            envelopes = {peer: by_site[peer].envelopes[site] for peer in sites if peer != site}
            answers[site] = GramDelivery(context=self.context.digest, envelopes=envelopes)
        return replace(self, last="shares"), answers

    def open(self, messages: Iterable[GramProducts]) -> tuple["GramServer", OpenedGram, GramOpening]:
        """Open the matrix, and pass all shares on so that every site can."""
        self._require("shares", "products")
        by_site = by_sender(self.context, messages, self.context.sites, "multiplied their shares")
        products = tuple(by_site[site] for site in sorted(by_site))
        answer = GramOpening(context=self.context.digest, products=products)
        return replace(self, last="open"), opened_gram(self.context, products), answer

    def _require(self, last: str, what: str) -> None:
        if self.last != last:
            raise FedLDError(f"{what} came when the Gram matrix was already at '{self.last}'")


def all_keys(context: GramContext, messages: Iterable[GramKey]) -> dict[str, GramKey]:
    """Everybody's keys, signatures checked; a participant without one ends the computation."""
    keys = checked_keys(context, messages)
    if missing := sorted(set(context.sites) - set(keys)):
        raise FedLDError(f"site '{missing[0]}' advertised no key; the Gram matrix begins again without it")
    return keys


def sketch_seed(context: GramContext, keys: dict[str, GramKey]) -> int:
    """Seed (63 bits) of the public sketch: from the context and everybody's fresh keys."""
    fresh = [keys[site].envelope_key for site in context.sites]
    return int(digest("sketch", context.digest, *fresh)[:16], 16) >> 1


def opened_gram(context: GramContext, messages: Iterable[GramProducts]) -> OpenedGram:
    """The matrix from signed shares of the products.

    Raises:
        FedLDError: a signature is wrong, there are too few shares, or they do not fit each other.
    """
    by_site = by_sender(context, messages, context.sites, "multiplied their shares")
    count = pairs(len(context.sites))
    points = {}
    for site, message in by_site.items():
        context.verify(site, message.signature, "products", site, message.products)
        values = np.frombuffer(bytes.fromhex(message.products), "<u4").astype(np.uint64)
        if values.size != count * len(PRIMES):
            raise FedLDError(f"the products of site '{site}' do not have the length of this Gram matrix")
        shares = values.reshape(count, len(PRIMES)).T
        _require_residues(shares, site)
        points[context.point(site)] = shares
    integers = open_matrix(points, len(context.sites), context.degree)
    return OpenedGram(integers, integers.astype(np.float64) * (context.bound / SCALE) ** 2)


def check_coefficients(
    opened: OpenedGram,
    weights: npt.NDArray[np.floating],
    published: npt.NDArray[np.floating],
    rule: Callable[[Matrix, Coefficients], Coefficients],
) -> None:
    """A site's check of the coefficients that the server publishes, before it gives its vector to their sum.

    Args:
        opened: the matrix, as this site opened it.
        weights: the sites' weights p, in the order of their sorted names.
        published: the coefficients c.
        rule: the aggregation rule, (K, p) -> c.

    Raises:
        FedLDError: the rule gives other coefficients, or those of fewer than three sites matter in the sum.
    """
    expected = rule(opened.matrix, np.asarray(weights, np.float64))
    scale = np.abs(expected).max()
    if published.shape != expected.shape or not np.abs(published - expected).max() <= 1e-6 * scale:
        raise FedLDError("the published coefficients do not follow from the Gram matrix and the weights")
    if (np.abs(expected) >= LEAST_SHARE * np.abs(expected).sum()).sum() < LEAST_SITES:
        raise FedLDError(
            f"fewer than {LEAST_SITES} sites have a coefficient that matters: the sum would show one vector"
        )


def combination_digest(opened: OpenedGram, coefficients: npt.NDArray[np.floating]) -> str:
    """Digest that a sum with coefficients is bound to: sites that were told different ones share no sum."""
    return digest("combination", opened.digest, coefficients.astype("<f8").tobytes())


def length_exponent(vector: npt.NDArray[np.floating]) -> int:
    """The power of two that bounds a vector's length, which its site announces before the Gram matrix.

    The opened matrix tells the length of the vector's sketch, so this tells nothing more.

    Raises:
        FedLDError: the vector is not finite, or longer than 2^64.

    >>> length_exponent(np.array([3.0, 4.0]))
    3
    """
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not length <= 2.0**MOST_EXPONENT:
        raise FedLDError(f"a vector has length {length:.6g}, beyond 2^{MOST_EXPONENT}")
    return max(-MOST_EXPONENT, int(np.ceil(np.log2(length)))) if length > 0 else -MOST_EXPONENT


def sketch_bound(exponents: Iterable[int]) -> float:
    """The public bound of all sketches, from what the sites announced: sketches may be twice as long."""
    return float(2.0 ** (1 + max(exponents)))


MOST_EXPONENT = 64

LEAST_SHARE = 0.01
"""Of the sum of all coefficients: a site with less does not hide the others."""


def _content(vector: Residues, zeros: Residues) -> bytes:
    """What one site's envelope holds: shares of the sketch and of zeros."""
    return vector.astype("<u4").tobytes() + zeros.astype("<u4").tobytes()


def _read(content: bytes, context: GramContext, sender: str) -> tuple[Residues, Residues]:
    """Shares (primes, k) of a sketch and (primes, pairs) of zeros."""
    cut = len(PRIMES) * context.length
    if len(content) != 4 * (cut + len(PRIMES) * pairs(len(context.sites))):
        raise FedLDError(f"the shares of site '{sender}' do not have the length of this Gram matrix")
    numbers = np.frombuffer(content, "<u4").astype(np.uint64)
    vector = numbers[:cut].reshape(len(PRIMES), -1)
    zeros = numbers[cut:].reshape(len(PRIMES), -1)
    _require_residues(vector, sender)
    _require_residues(zeros, sender)
    return vector, zeros


def _require_residues(shares: Residues, sender: str) -> None:
    if (shares >= np.array(PRIMES, np.uint64)[:, None]).any():
        raise FedLDError(f"the shares of site '{sender}' are not below their primes")
