"""Shamir's sharing of 32-byte secrets: any `threshold` shares give the secret, fewer say nothing of it.

The secret is the constant term of a random polynomial of degree threshold - 1 over the integers modulo
PRIME, share x its value at x. PRIME is the smallest prime above 2^256, so every 32-byte secret is a number
below it.
"""

import secrets
from collections.abc import Mapping

from fedld.errors import FedLDError

PRIME = 2**256 + 297
SHARE_BYTES = 33


def least_shares(sites: int) -> int:
    """Threshold against a malicious server: floor(2 m / 3) + 1 of m sites.

    Two lists of survivors would each need so many signatures, hence more than a third of the sites signing
    both, which honest sites refuse.

    >>> [least_shares(m) for m in (3, 5, 12)]
    [3, 4, 9]
    """
    return 2 * sites // 3 + 1


def split(secret: bytes, threshold: int, points: int) -> list[bytes]:
    """Shares of a secret at the points 1, 2, ..., `points`.

    Args:
        secret: 32 bytes.
        threshold: how many shares give the secret back.
        points: how many shares to make.

    >>> shares = split(bytes(range(32)), 3, 5)
    >>> recover({2: shares[1], 5: shares[4], 1: shares[0]}, 3) == bytes(range(32))
    True
    """
    if len(secret) != 32 or not 1 <= threshold <= points:
        raise FedLDError("sharing needs a secret of 32 bytes and a threshold of at most the number of shares")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(polynomial, x).to_bytes(SHARE_BYTES, "big") for x in range(1, points + 1)]


def recover(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of shares by their points, by Lagrange interpolation at 0.

    Raises:
        FedLDError: there are too few shares, or they are not shares of a 32-byte secret.
    """
    if len(shares) < threshold:
        raise FedLDError(f"{len(shares)} shares are too few: {threshold} are needed")
    chosen = sorted(shares)[:threshold]
    secret = 0
    for x in chosen:
        if not 1 <= x < PRIME or len(shares[x]) != SHARE_BYTES:
            raise FedLDError("a share is malformed")
        above = 1
        below = 1
        for other in chosen:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        secret += int.from_bytes(shares[x], "big") * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret >= 2**256:
        raise FedLDError("the shares do not belong together")
    return secret.to_bytes(32, "big")


def _value(polynomial: list[int], x: int) -> int:
    """Value of a polynomial at x, by Horner's rule; the constant term comes first."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value
