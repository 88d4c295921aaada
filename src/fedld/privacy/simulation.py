"""Secure sums and Gram matrices among simulated sites in one process: the same messages, as bytes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedld.errors import FedLDError
from fedld.privacy.context import GramContext, SecureContext, SumContext, digest, public_key
from fedld.privacy.fixed_point import FixedPoint, Integers
from fedld.privacy.gram import Coefficients, GramSite, Matrix, OpenedGram, check_coefficients
from fedld.privacy.journal import Journal
from fedld.privacy.numbered import (
    SiteSide,
    answer_gram,
    answer_sum,
    begin_gram,
    begin_sum,
    open_gram,
    open_sum,
    site_opens_gram,
)
from fedld.privacy.sum_server import OpenedSum
from fedld.privacy.sum_site import SumSite

GRAM_STEPS = ("key", "shares", "products")
"""The three messages of a site for a Gram matrix, in order."""

STEPS = ("keys", "shares", "input", "check", "unmask")
"""The five messages of a site, in order."""


@dataclass(frozen=True)
class SecureSum:
    """An opened sum in real numbers, and what it took.

    Args:
        total: sum of weight times vector over the survivors.
        survivors: the sites whose vectors are in it, sorted.
        integers: the same sum as integers.
        sent: bytes that each site sent.
    """

    total: npt.NDArray[np.float64]
    survivors: tuple[str, ...]
    integers: Integers = field(repr=False)
    sent: dict[str, int] = field(repr=False)


@dataclass(frozen=True)
class SecureGram:
    """An opened Gram matrix, and what it took.

    Args:
        matrix: inner products of the sketches, rows and columns in the order of `sites`.
        integers: the same of the rounded sketches, exact.
        sites: sorted names.
        sent: bytes that each site sent.
        delivered: bytes that the server sent to all of them.
        seed: seed of the sketch.
    """

    matrix: npt.NDArray[np.float64]
    integers: npt.NDArray[np.int64] = field(repr=False)
    sites: tuple[str, ...]
    sent: dict[str, int] = field(repr=False)
    delivered: int = field(repr=False)
    seed: int

    @property
    def opened(self) -> OpenedGram:
        """The matrix as every site opened it."""
        return OpenedGram(self.integers, self.matrix)


Sketch = Callable[[npt.NDArray[np.floating], int, int], npt.NDArray[np.floating]]
"""(vector, length, seed) -> sketch."""


def secure_sum(
    vectors: Mapping[str, npt.NDArray[np.floating]],
    weights: Mapping[str, int],
    code: FixedPoint,
    *,
    dropouts: Mapping[str, str] | None = None,
    run: str = "simulation",
    round: int = 1,
    purpose: str = "update",
    settings: str | None = None,
) -> SecureSum:
    """Sum of the sites' weighted vectors, of which nobody sees one.

    Args:
        vectors: each site's vector, by name.
        weights: each site's integer weight.
        code: how vectors become integers.
        dropouts: sites that stop, and the message that each no longer sends (one of STEPS).
        run: name of the run.
        round: number of the round.
        purpose: which sum of the round.
        settings: digest of what the sites agreed on beside the model, if it is more than a name.

    Raises:
        FedLDError: a vector is beyond its bound, or too few sites are left.

    >>> from fedld.privacy.fixed_point import Segment
    >>> code = FixedPoint(bits=32, sites=5, largest_weight=8, segments=(Segment("update", 3, 1.0),))
    >>> vectors = {name: np.full(3, 0.5) for name in "abcde"}
    >>> secure_sum(vectors, dict.fromkeys("abcde", 2), code, dropouts={"c": "input"}).total.round(6)
    array([4., 4., 4.])
    """
    identities = _identities(vectors)
    context = SumContext(
        run=run,
        round=round,
        purpose=purpose,
        attempt=0,
        model=digest("model", "simulation"),
        settings=settings or digest("settings", "simulation"),
        participants=identities.public,
        code=code,
    )
    coded = {site: code.encode(vectors[site], weights[site]) for site in context.sites}
    with TemporaryDirectory() as folder:
        simulated = _SimulatedSum(context, identities, Path(folder), dropouts or {}, STEPS)
        opened = simulated.run(coded)
    return SecureSum(code.decode(opened.total), opened.survivors, opened.total, simulated.sent)


def secure_gram(
    vectors: Mapping[str, npt.NDArray[np.floating]],
    sketch: Sketch,
    *,
    length: int,
    bound: float,
    dropouts: Mapping[str, str] | None = None,
    run: str = "simulation",
    round: int = 1,
) -> SecureGram:
    """Gram matrix of the sites' sketched vectors, of which nobody sees one.

    Args:
        vectors: each site's vector, by name.
        sketch: (vector, length, seed) -> its sketch, a linear map.
        length: numbers of a sketch.
        bound: largest Euclidean length of a sketch.
        dropouts: sites that stop, and the message that each no longer sends (one of GRAM_STEPS).
        run: name of the run.
        round: number of the round.

    Raises:
        FedLDError: a sketch is beyond its bound, a site did not share one, or too few are left after that.
    """
    identities = _identities(vectors)
    context = GramContext(
        run=run,
        round=round,
        purpose="gram",
        attempt=0,
        model=digest("model", "simulation"),
        settings=digest("settings", "simulation"),
        participants=identities.public,
        length=length,
        dimension=len(next(iter(vectors.values()))),
        bound=bound,
    )
    with TemporaryDirectory() as folder:
        simulated = _SimulatedGram(context, identities, Path(folder), dropouts or {}, GRAM_STEPS)
        opened = simulated.run(lambda site, seed: sketch(vectors[site], length, seed))
    return SecureGram(
        matrix=opened.matrix,
        integers=opened.integers,
        sites=context.sites,
        sent=simulated.sent,
        delivered=simulated.delivered,
        seed=simulated.seed,
    )


def agreed_coefficients(
    gram: SecureGram,
    shares: npt.NDArray[np.float64],
    rule: Callable[[Matrix, Coefficients], Coefficients],
    *,
    relayed: Mapping[str, Coefficients] | None = None,
) -> Coefficients:
    """Coefficients that the server publishes and every site computes again before it goes on.

    Args:
        gram: the opened matrix.
        shares: the sites' weights p, in the order of their sorted names.
        rule: (K, p) -> c.
        relayed: what a lying server tells single sites instead.

    Returns:
        The coefficients c.

    Raises:
        FedLDError: a site was told others than follow, or fewer than three matter.
    """
    published = rule(gram.matrix, shares)
    for site in gram.sites:
        heard = (relayed or {}).get(site, published)
        try:
            check_coefficients(gram.opened, shares, heard, rule)
        except FedLDError as error:
            raise FedLDError(f"site '{site}' refuses the sum: {error}") from None
    return published


@dataclass(frozen=True)
class _Identities:
    private: dict[str, Ed25519PrivateKey]

    @property
    def public(self) -> dict[str, str]:
        return {site: public_key(identity) for site, identity in self.private.items()}


def _identities(sites: Iterable[str]) -> _Identities:
    return _Identities({site: Ed25519PrivateKey.generate() for site in sites})


class _Simulated:
    """All sites of a secure computation in one process."""

    def __init__(
        self,
        context: SecureContext,
        identities: _Identities,
        folder: Path,
        dropouts: Mapping[str, str],
        steps: Sequence[str],
    ) -> None:
        self.identities = identities.private
        self.journals = {site: Journal(folder / f"{site}.jsonl") for site in context.sites}
        self.dropouts = {site: steps.index(step) for site, step in dropouts.items()}
        self.steps = steps
        self.sent = dict.fromkeys(context.sites, 0)
        self.delivered = 0
        self._context = context

    def _present(self, sites: Iterable[str], step: str) -> list[str]:
        """Sites that still send this step's message."""
        now = self.steps.index(step)
        return [site for site in sites if self.dropouts.get(site, len(self.steps)) > now]


class _SimulatedSum(_Simulated):
    """All sites of a secure sum."""

    def run(self, coded: Mapping[str, Integers]) -> OpenedSum:
        """The five messages, one after the other."""
        context = cast(SumContext, self._context)
        sides = {name: self._side(name, coded[name]) for name in context.sites}
        sites: dict[str, SumSite] = {}
        first: dict[str, bytes] = {}
        for name in self._present(context.sites, "keys"):
            sites[name], first[name] = begin_sum(context, sides[name])
            self.sent[name] += len(first[name])

        def ask(number: int, answers: Mapping[str, bytes]) -> dict[str, bytes]:
            messages: dict[str, bytes] = {}
            for name in self._present(answers, self.steps[number - 1]):
                sites[name], messages[name] = answer_sum(sites[name], number, answers[name], sides[name])
                self.sent[name] += len(messages[name])
            return messages

        return open_sum(context, first, ask, _refused)

    def _side(self, name: str, vector: Integers) -> SiteSide:
        return SiteSide(
            site=name,
            identity=self.identities[name],
            journal=self.journals[name],
            vector=lambda _: vector,
        )


def _refused(site: str, why: str) -> None:
    """Simulated sites are honest, so a refused message is a defect."""
    raise FedLDError(f"the message of simulated site '{site}' was refused: {why}")


class _SimulatedGram(_Simulated):
    """All sites of a secure Gram matrix; each opens it and compares with the server."""

    seed: int

    def run(self, sketched: Callable[[str, int], npt.NDArray[np.floating]]) -> OpenedGram:
        """The three messages, one after the other."""
        context = cast(GramContext, self._context)
        sides = {name: self._side(name, partial(sketched, name)) for name in context.sites}
        sites: dict[str, GramSite] = {}
        first: dict[str, bytes] = {}
        for name in self._present(context.sites, "key"):
            sites[name], first[name] = begin_gram(context, sides[name])
            self.sent[name] += len(first[name])

        def ask(number: int, answers: Mapping[str, bytes]) -> dict[str, bytes]:
            messages: dict[str, bytes] = {}
            for name in self._present(answers, self.steps[number - 1]):
                self.delivered += len(answers[name])
                sites[name], messages[name] = answer_gram(sites[name], number, answers[name], sides[name])
                self.sent[name] += len(messages[name])
            return messages

        result = open_gram(context, first, ask, _refused)
        self.seed = result.seed
        for name in self._present(sites, "products"):
            self.delivered += len(result.opening)
            assert site_opens_gram(sites[name], result.opening).digest == result.opened.digest
        return result.opened

    def _side(self, name: str, sketched: Callable[[int], npt.NDArray[np.floating]]) -> SiteSide:
        return SiteSide(
            site=name,
            identity=self.identities[name],
            journal=self.journals[name],
            vector=_no_vector,
            sketch=lambda _, seed: sketched(seed),
        )


def _no_vector(context: SumContext) -> Integers:
    raise FedLDError("a site has no vector for a sum while its Gram matrix is computed")
