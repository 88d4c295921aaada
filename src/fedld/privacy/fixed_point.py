"""Real vectors as integers modulo 2^32 or 2^64, so that sums are exact and masks are uniform.

A coordinate x with |x| <= bound becomes q = round(x (2^v - 1) / bound), a signed integer of v bits. A site
with integer weight w contributes w q. With m sites of weight at most W each,

    |sum_i w_i q_i| <= m W (2^v - 1) < 2^(v + bits(m W)) <= 2^(bits - 1),

where v = bits - 1 - bits(m W): the sum fits the signed range whatever the sites send, so it cannot overflow.
The decoded sum differs from the real one by at most (bound / (2^v - 1)) / 2 for each unit of weight.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedld.errors import FedLDError

Integers = npt.NDArray[np.unsignedinteger]
"""A vector in Z_2^32 or Z_2^64: uint32 or uint64."""

LEAST_BITS = 8  # of a value: with fewer, a sum says nothing of its terms
MOST_BITS = 50  # of a value: three roundings of float64 stay below half a unit, so no value exceeds 2^v - 1
CHUNK = 1 << 18  # coordinates handled at once, so that temporaries stay in the processor's cache


@dataclass(frozen=True)
class Segment:
    """A named stretch of the vector with a public bound of its own.

    Args:
        name: what it holds, for messages.
        length: how many coordinates.
        bound: largest absolute value that a coordinate may have.
        weighted: whether a site's weight multiplies it; counts and the weight itself are summed as they are.
    """

    name: str
    length: int
    bound: float
    weighted: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= 2**33:
            raise FedLDError(f"segment '{self.name}' needs a length from 1 to 2^33, not {self.length}")
        if not 0 < self.bound < 1e30:
            raise FedLDError(f"segment '{self.name}' needs a bound above 0 and below 1e30, not {self.bound}")


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """How vectors of several segments become integers modulo 2^bits.

    Args:
        bits: 32 or 64.
        sites: how many sites may contribute.
        largest_weight: largest integer weight of one site.
        segments: the vector's stretches, in order.

    >>> code = FixedPoint(bits=32, sites=3, largest_weight=100, segments=(Segment("update", 2, 1.0),))
    >>> total = code.encode(np.array([0.5, -0.25]), 100) + code.encode(np.array([0.5, 1.0]), 50)
    >>> code.decode(total).round(3)
    array([75., 25.])
    """

    bits: int
    sites: int
    largest_weight: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise FedLDError(f"fixed point needs 32 or 64 bits, not {self.bits}")
        if self.sites < 1 or not 1 <= self.largest_weight < 2**40:
            raise FedLDError("fixed point needs at least one site and a largest weight from 1 to 2^40 - 1")
        if not self.segments or len({s.name for s in self.segments}) < len(self.segments):
            raise FedLDError("fixed point needs segments with different names")
        for segment in self.segments:
            if self.value_bits(segment) < LEAST_BITS:
                raise FedLDError(
                    f"{self.bits} bits leave {self.value_bits(segment)} for a value of '{segment.name}' with "
                    f"{self.sites} sites of weight up to {self.largest_weight}: take 64 or smaller weights"
                )

    @property
    def length(self) -> int:
        """Coordinates of the whole vector."""
        return sum(segment.length for segment in self.segments)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the integers, the same bytes on every machine."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    def value_bits(self, segment: Segment) -> int:
        """Bits of a value's magnitude: what the sum of weights and the sign leave."""
        weights = self.sites * (self.largest_weight if segment.weighted else 1)
        return min(MOST_BITS, self.bits - 1 - weights.bit_length())

    def resolution(self, segment: Segment) -> float:
        """Difference of two neighbouring values."""
        return float(segment.bound / ((1 << self.value_bits(segment)) - 1))

    def encode(self, vector: npt.NDArray[np.floating], weight: int) -> Integers:
        """Integers of a site's vector, times its weight.

        Args:
            vector: real numbers, all segments one after the other.
            weight: the site's integer weight.

        Raises:
            FedLDError: a coordinate is beyond its bound or not finite, or the weight is too large.
        """
        if vector.shape != (self.length,):
            raise FedLDError(f"a vector of {self.length} numbers is needed, not of shape {vector.shape}")
        if not 0 <= weight <= self.largest_weight:
            raise FedLDError(f"the weight {weight} is not between 0 and the largest, {self.largest_weight}")
        coded = np.empty(self.length, self.dtype)
        start = 0
        for segment in self.segments:
            for low in range(start, start + segment.length, CHUNK):
                part = slice(low, min(low + CHUNK, start + segment.length))
                coded[part] = self._encode_chunk(vector[part], segment, weight)
            start += segment.length
        return coded

    def _encode_chunk(self, chunk: npt.NDArray[np.floating], segment: Segment, weight: int) -> Integers:
        largest = float(np.abs(chunk).max())
        if not largest <= segment.bound:  # NaN compares false
            raise FedLDError(
                f"a coordinate of '{segment.name}' is {largest:.6g}, beyond its bound {segment.bound:.6g}"
            )
        values = np.rint(np.multiply(chunk, 1 / self.resolution(segment), dtype=np.float64)).astype(np.int64)
        if segment.weighted:
            values *= weight
        coded: Integers = values.astype(self.dtype)
        return coded

    def decode(self, total: Integers) -> npt.NDArray[np.float64]:
        """Real numbers of a sum of encoded vectors."""
        if total.shape != (self.length,) or total.dtype != self.dtype:
            raise FedLDError(f"a sum of {self.length} integers of {self.bits} bits is needed")
        signed = total.view(np.dtype("<i4" if self.bits == 32 else "<i8"))
        decoded = np.empty(self.length)
        start = 0
        for segment in self.segments:
            part = slice(start, start + segment.length)
            np.multiply(signed[part], self.resolution(segment), out=decoded[part])
            start += segment.length
        return decoded
