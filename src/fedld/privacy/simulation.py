"""A secure sum among simulated sites in one process: the same five messages, as bytes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedld.privacy.context import SumContext, digest, public_key
from fedld.privacy.fixed_point import FixedPoint, Integers
from fedld.privacy.journal import Journal
from fedld.privacy.messages import (
    AdvertiseKeys,
    ConsistencyCheck,
    KeyList,
    MaskedInput,
    ShareDelivery,
    ShareKeys,
    SumMessage,
    SurvivorList,
    SurvivorProof,
    Unmask,
    from_bytes,
    to_bytes,
)
from fedld.privacy.sum_server import OpenedSum, SumServer
from fedld.privacy.sum_site import SumSite

STEPS = ("keys", "shares", "input", "check", "unmask")
"""The five messages of a site, in order."""

K = TypeVar("K", bound=SumMessage)


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


def secure_sum(
    vectors: Mapping[str, npt.NDArray[np.floating]],
    weights: Mapping[str, int],
    code: FixedPoint,
    *,
    dropouts: Mapping[str, str] | None = None,
    run: str = "simulation",
    round: int = 1,
    purpose: str = "update",
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

    Raises:
        FedLDError: a vector is beyond its bound, or too few sites are left.

    >>> from fedld.privacy.fixed_point import Segment
    >>> code = FixedPoint(bits=32, sites=5, largest_weight=8, segments=(Segment("update", 3, 1.0),))
    >>> vectors = {name: np.full(3, 0.5) for name in "abcde"}
    >>> secure_sum(vectors, dict.fromkeys("abcde", 2), code, dropouts={"c": "input"}).total.round(6)
    array([4., 4., 4.])
    """
    identities = {site: Ed25519PrivateKey.generate() for site in vectors}
    context = SumContext(
        run=run,
        round=round,
        purpose=purpose,
        attempt=0,
        model=digest("model", "simulation"),
        settings=digest("settings", "simulation"),
        participants={site: public_key(identity) for site, identity in identities.items()},
        code=code,
    )
    with TemporaryDirectory() as folder:
        journals = {site: Journal(Path(folder) / f"{site}.jsonl") for site in vectors}
        simulated = _Simulated(context, identities, journals, dropouts or {})
        opened = simulated.run({site: code.encode(vectors[site], weights[site]) for site in context.sites})
    return SecureSum(code.decode(opened.total), opened.survivors, opened.total, simulated.sent)


class _Simulated:
    """All sites of a sum in one process."""

    def __init__(
        self,
        context: SumContext,
        identities: Mapping[str, Ed25519PrivateKey],
        journals: Mapping[str, Journal],
        dropouts: Mapping[str, str],
    ) -> None:
        self.context = context
        self.identities = identities
        self.journals = journals
        self.dropouts = dropouts
        self.sent = dict.fromkeys(context.sites, 0)

    def run(self, coded: Mapping[str, Integers]) -> OpenedSum:
        """The five messages, one after the other."""
        sites: dict[str, SumSite] = {}
        server = SumServer(context=self.context)
        first: list[AdvertiseKeys] = []
        for name in self._present(self.context.sites, "keys"):
            sites[name], advert = SumSite.begin(
                self.context, name, self.identities[name], self.journals[name]
            )
            first.append(self._send(AdvertiseKeys, advert, name))
        server, keys = server.list_keys(first)

        second: list[ShareKeys] = []
        for name in self._present(sorted(sites), "shares"):
            sites[name], shares = sites[name].share_keys(self._send(KeyList, keys), self.journals[name])
            second.append(self._send(ShareKeys, shares, name))
        server, deliveries = server.deliver(second)

        third: list[MaskedInput] = []
        for name in self._present(sorted(deliveries), "input"):
            delivery = self._send(ShareDelivery, deliveries[name])
            sites[name], masked = sites[name].mask(delivery, coded[name], self.journals[name])
            third.append(self._send(MaskedInput, masked, name))
        server, survivors = server.collect(third)

        fourth: list[ConsistencyCheck] = []
        for name in self._present(survivors.survivors, "check"):
            listed = self._send(SurvivorList, survivors)
            sites[name], check = sites[name].check(listed, self.identities[name], self.journals[name])
            fourth.append(self._send(ConsistencyCheck, check, name))
        server, proof = server.confirm(fourth)

        fifth: list[Unmask] = []
        for name in self._present(list(proof.signatures), "unmask"):
            sites[name], unmask = sites[name].unmask(self._send(SurvivorProof, proof), self.journals[name])
            fifth.append(self._send(Unmask, unmask, name))
        return server.open(fifth)[1]

    def _present(self, sites: Sequence[str], step: str) -> Collection[str]:
        """Sites that still send this step's message."""
        stops = {site: STEPS.index(self.dropouts[site]) for site in self.dropouts}
        return [site for site in sites if stops.get(site, len(STEPS)) > STEPS.index(step)]

    def _send(self, kind: type[K], message: K, sender: str | None = None) -> K:
        """A message as the other side reads it."""
        content = to_bytes(message)
        if sender is not None:
            self.sent[sender] += len(content)
        return from_bytes(kind, content, self.context)
