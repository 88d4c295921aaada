"""Secure sums and Gram matrices in which one message is not what its sender wrote.

Whoever reads the message refuses it in one sentence, or the result is that of the numbers that arrived. A
masked vector and the shares of a sketch may change it, since a site can lie about its own numbers.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from fedld.privacy import numbered, simulation
from fedld.privacy.fixed_point import FixedPoint, Segment
from fedld.privacy.messages import GramDelivery, GramShares, MaskedInput

SITES = "abcd"
LENGTH = 6
CODE = FixedPoint(bits=32, sites=len(SITES), largest_weight=4, segments=(Segment("update", LENGTH, 1.0),))
LYING = (MaskedInput, GramShares, GramDelivery)
ODD = [b"", b"{}", b"null", b"[", b"\xff\xfe", b"\x00" * 40, b"[" * 2000, b'"' + b"x" * 300 + b'"', b"1e999"]


def _spoilt(content: bytes, rng: random.Random) -> bytes:
    """Bytes of a message changed, cut, repeated or replaced."""
    data, at = bytearray(content), rng.randrange(len(content))
    match rng.randrange(6):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data += data[at:]
        case 3:
            data[at:at] = rng.choice(ODD)
        case 4:
            data = bytearray(rng.choice(ODD))
        case 5:
            data[at] = rng.choice(b'0123456789abcdef"{}[]:,\n')
    return bytes(data)


class _Wire:
    """Reads messages; the one of number `bad` is spoilt on its way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.bad, self.number = rng, rng.randrange(48), 0
        self.read, self.changed = numbered.from_bytes, None

    def __call__(self, kind: Any, content: bytes, context: Any = None) -> Any:
        self.number += 1
        if self.number == self.bad:
            spoilt = _spoilt(content, self.rng)
            self.changed = kind if spoilt != content else None
            content = spoilt
        return self.read(kind, content, context)


def make_case(rng: random.Random, _: Path) -> Callable[[], object]:
    """A sum or a Gram matrix with one bad message."""
    vectors = {site: np.linspace(-0.5, 0.5, LENGTH) * (k + 1) / 4 for k, site in enumerate(SITES)}
    wire = _Wire(rng)
    sums = rng.random() < 0.6

    def case() -> None:
        with patch.object(numbered, "from_bytes", wire):
            if sums:
                found: Any = simulation.secure_sum(vectors, dict.fromkeys(SITES, 2), CODE)
                expected: Any = 2 * sum(vectors[site] for site in found.survivors)
                result = found.total
            else:
                found = simulation.secure_gram(
                    vectors, lambda v, length, seed: v[:length], length=4, bound=2.0
                )
                rows = np.array([vectors[site][:4] for site in SITES])
                result, expected = found.matrix, rows @ rows.T
        if wire.changed not in LYING:
            assert np.allclose(result, expected, atol=1e-3), f"a changed {wire.changed} gave another result"

    return case
