"""Shamir's sharing of whole vectors over two 31-bit primes, and inner products from shares.

A vector of integers is shared coordinate by coordinate with polynomials of degree t. The product of two
shares is a share of degree 2 t of the product, and so is a sum of products: of the inner product. Its
polynomial is not random, so random polynomials with constant term 0 are added before it is opened at 2 t + 1
points.

Sketches have length at most 2^30 after rounding, so an inner product lies between -2^60 and 2^60; the two
primes together tell such numbers apart (Chinese remainder theorem), and the opened matrix is exact.
"""

import secrets
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedld.errors import FedLDError

PRIMES = (2**31 - 1, 2**31 - 19)
LARGEST = 1 << 30  # length of a sketch as integers
SCALE = 1 << 29  # length of a sketch at its bound, which leaves room for rounding

Residues = npt.NDArray[np.uint64]
"""Numbers modulo each prime: the first axis has one entry per prime."""

_MODULI = np.array(PRIMES, np.uint64)


def pairs(sites: int) -> int:
    """Entries of a symmetric matrix."""
    return sites * (sites + 1) // 2


def rounded(sketch: npt.NDArray[np.floating], bound: float) -> npt.NDArray[np.int64]:
    """A sketch as integers, of length SCALE at the bound.

    Raises:
        FedLDError: the sketch is longer than the bound, or not finite.
    """
    length = float(np.linalg.norm(sketch.astype(np.float64)))
    if not length <= bound:  # NaN compares false
        raise FedLDError(f"a sketch has length {length:.6g}, beyond its bound {bound:.6g}")
    integers: npt.NDArray[np.int64] = np.rint(sketch.astype(np.float64) * (SCALE / bound)).astype(np.int64)
    assert int(integers @ integers) < LARGEST**2
    return integers


def share_vector(integers: npt.NDArray[np.int64], degree: int, points: int) -> Residues:
    """Shares (points, primes, k) of a vector of k integers at the points 1, 2, ..."""
    constant = integers[None, :] % _MODULI.astype(np.int64)[:, None]
    return _shares(constant.astype(np.uint64), degree, points)


def share_zeros(count: int, degree: int, points: int) -> Residues:
    """Shares (points, primes, count) of zeros."""
    return _shares(np.zeros((len(PRIMES), count), np.uint64), degree, points)


def _shares(constant: Residues, degree: int, points: int) -> Residues:
    """Values of random polynomials with the given constant terms, by Horner's rule."""
    moduli = _MODULI[:, None]
    coefficients = [constant, *(_uniform(constant.shape[1]) for _ in range(degree))]
    shares = np.empty((points, *constant.shape), np.uint64)
    for x in range(1, points + 1):
        value = np.zeros_like(constant)
        for coefficient in reversed(coefficients):
            value = (value * np.uint64(x) + coefficient) % moduli
        shares[x - 1] = value
    return shares


def _uniform(count: int) -> Residues:
    """Random numbers modulo each prime, exactly uniform: 31 random bits, drawn again where not below it."""
    drawn = np.empty((len(PRIMES), count), np.uint64)
    for k, prime in enumerate(PRIMES):
        todo = np.arange(count)
        while len(todo):
            bits = np.frombuffer(secrets.token_bytes(4 * len(todo)), "<u4") >> np.uint32(1)
            drawn[k, todo] = bits
            todo = todo[bits >= prime]
    return drawn


def product_shares(shares: Residues, zeros: Residues) -> Residues:
    """One site's shares (primes, pairs) of all inner products, made random by the sum of the shares of zero.

    Args:
        shares: its shares (sites, primes, k) of the sites' vectors, in the order of their names.
        zeros: its shares (sites, primes, pairs) of everybody's zeros.
    """
    moduli = _MODULI[:, None]
    rows = []
    for a in range(len(shares)):
        products = (shares[a][None] * shares[a:]) % moduli[None]
        rows.append(products.sum(axis=2) % _MODULI[None])
    inner = np.concatenate(rows).T
    randomised: Residues = (inner + zeros.sum(axis=0)) % moduli
    return randomised


def open_matrix(products: Mapping[int, Residues], sites: int, degree: int) -> npt.NDArray[np.int64]:
    """The Gram matrix as integers, from sites' shares of the inner products by their points.

    Args:
        products: shares (primes, pairs) by point.
        sites: m.
        degree: t; the shares lie on polynomials of degree 2 t.

    Raises:
        FedLDError: there are too few shares, or those beyond 2 t + 1 do not fit the others.
    """
    needed = 2 * degree + 1
    if len(products) < needed:
        raise FedLDError(f"{len(products)} sites gave shares of the Gram matrix: {needed} are needed")
    points = sorted(products)
    chosen = points[:needed]
    for x in points[needed:]:
        if not np.array_equal(_interpolated(products, chosen, x), products[x]):
            raise FedLDError("the shares of the Gram matrix do not fit each other: a site sent a wrong one")
    values = [_signed(int(a), int(b)) for a, b in _interpolated(products, chosen, 0).T]
    matrix = np.empty((sites, sites), np.int64)
    upper = np.triu_indices(sites)
    matrix[upper] = values
    matrix.T[upper] = values
    return matrix


def _interpolated(products: Mapping[int, Residues], chosen: list[int], at: int) -> Residues:
    """Values at a point of the polynomials through the chosen points, modulo each prime."""
    value = np.zeros_like(products[chosen[0]])
    for k, prime in enumerate(PRIMES):
        for x in chosen:
            factor = 1
            for other in chosen:
                if other != x:
                    factor = factor * (at - other) * pow(x - other, -1, prime) % prime
            value[k] = (value[k] + products[x][k] * np.uint64(factor)) % np.uint64(prime)
    return value


def _signed(first: int, second: int) -> int:
    """The integer nearest to 0 with these remainders.

    >>> _signed(PRIMES[0] - 5, PRIMES[1] - 5)
    -5
    """
    whole = PRIMES[0] * PRIMES[1]
    value = (first + PRIMES[0] * ((second - first) * pow(PRIMES[0], -1, PRIMES[1]) % PRIMES[1])) % whole
    return value - whole if value > whole // 2 else value
