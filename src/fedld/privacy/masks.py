"""Keys that two sites share, envelopes for shares, and masks as long as a model.

X25519 and HKDF-SHA256 give two sites a key that nobody else knows; ChaCha20-Poly1305 encrypts the shares that
travel through the server; ChaCha20's key stream is the mask. Every key is used for one purpose.
"""

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedld.errors import FedLDError
from fedld.privacy.context import framed
from fedld.privacy.fixed_point import Integers

CHUNK_BYTES = 1 << 20  # of key stream at once: it stays in the processor's cache
NONCE_BYTES = 12


def derived_key(secret: bytes, context: str, purpose: str, *parts: str) -> bytes:
    """32 bytes for one purpose in one context, from a shared or random secret by HKDF-SHA256."""
    info = framed(purpose, *parts)
    return HKDF(algorithm=SHA256(), length=32, salt=bytes.fromhex(context), info=info).derive(secret)


def public_half(secret: bytes) -> str:
    """Public X25519 key of a secret one, in hexadecimal."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()


def agreed(secret: bytes, public: str) -> bytes:
    """What X25519 gives both owners of a pair of keys.

    Raises:
        FedLDError: the public key is one of the few that give everybody the same.
    """
    try:
        theirs = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        return X25519PrivateKey.from_private_bytes(secret).exchange(theirs)
    except ValueError:
        raise FedLDError("a public key is of low order and gives no secret") from None


def seal(key: bytes, content: bytes, about: bytes) -> bytes:
    """Encrypt and authenticate with ChaCha20-Poly1305 under a random nonce, which comes first."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """What `seal` encrypted.

    Raises:
        FedLDError: the key is another one, or a byte was changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
    except (InvalidTag, ValueError):
        raise FedLDError("an envelope was not sealed for this site in this round, or was changed") from None


def add_mask(vector: Integers, key: bytes, *, subtract: bool = False) -> None:
    """Add ChaCha20's key stream to a vector modulo 2^32 or 2^64, in place.

    Args:
        vector: contiguous unsigned integers.
        key: 32 bytes that make no other key stream.
        subtract: take the stream away instead.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), None).encryptor()
    width = vector.dtype.itemsize
    zeros = bytes(CHUNK_BYTES)
    buffer = np.empty(CHUNK_BYTES, np.uint8)
    combine = np.subtract if subtract else np.add
    for start in range(0, len(vector), CHUNK_BYTES // width):
        part = vector[start : start + CHUNK_BYTES // width]
        size = len(part) * width
        stream.update_into(memoryview(zeros)[:size], buffer[:size])  # type: ignore[arg-type]
        combine(part, buffer[:size].view(vector.dtype), out=part)
