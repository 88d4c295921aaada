"""Randomness is derived, never shared: every (seed, purpose, round, client) has a generator of its own.

So an experiment gives the same bits for any number of workers, and after a kill and resume there is no
generator state to restore.
"""

from hashlib import blake2b

import numpy as np
import torch


def derive(seed: int, *keys: str | int) -> int:
    """Derive a 63-bit seed that depends on `seed` and on every key.

    >>> derive(0, "train", 1, 2) == derive(0, "train", 1, 2)
    True
    >>> derive(0, "train", 12) == derive(0, "train", 1, 2)
    False
    """
    text = "/".join(str(key) for key in (seed, *keys))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *keys: str | int) -> np.random.Generator:
    """Make the NumPy generator of one purpose."""
    return np.random.default_rng(derive(seed, *keys))


def torch_generator(seed: int, *keys: str | int) -> torch.Generator:
    """Make the CPU torch generator of one purpose."""
    return torch.Generator().manual_seed(derive(seed, *keys))
