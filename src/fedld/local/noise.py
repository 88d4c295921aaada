"""Random numbers for private steps: ChaCha20's key stream as uniform and normal numbers.

Whoever does not have the key cannot tell these numbers from others, however many of them he sees. The same
key and purpose give the same numbers, so a simulation can be repeated.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from fedld.errors import FedLDError

KEY_BYTES = 32


def key_of_seed(seed: int) -> bytes:
    """Make the key of a simulation from the run's seed: no secret, but repeatable.

    >>> len(key_of_seed(0))
    32
    """
    return hashlib.blake2b(f"private steps {seed}".encode(), digest_size=KEY_BYTES).digest()


class KeyedRandom:
    """Numbers of one purpose under one key.

    Args:
        key: 32 bytes, a secret where the numbers must be one.
        purpose: what they are for; every purpose has a key stream of its own.

    Raises:
        FedLDError: the package `cryptography` is missing.
    """

    def __init__(self, key: bytes, *purpose: str | int) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
        except ImportError:
            raise FedLDError(
                "differential privacy needs the package 'cryptography': pip install 'fedld[dp]'"
            ) from None
        text = "/".join(str(part) for part in purpose)
        own_key = hashlib.blake2b(text.encode(), key=key, digest_size=KEY_BYTES).digest()
        self._stream = Cipher(ChaCha20(own_key, bytes(16)), None).encryptor()

    def uniform(self, count: int) -> Tensor:
        """Give the next float64 numbers, multiples of 2^-53 from 0 to below 1."""
        content = self._stream.update(bytes(8 * count))
        return torch.from_numpy((np.frombuffer(content, "<u8") >> np.uint64(11)) * 2.0**-53)

    def normal(self, count: int) -> Tensor:
        """Give the next standard normal float64 numbers, by Box and Muller's method.

        None is beyond 8.58, which a normal number is with a probability of 1e-17.
        """
        half = (count + 1) // 2
        numbers = self.uniform(2 * half)
        length = torch.log(1 - numbers[:half]).mul_(-2).sqrt_()
        angle = numbers[half:].mul_(2 * math.pi)
        return torch.cat([length * angle.cos(), length * angle.sin()])[:count]
