"""Pixels of any common kind to uint8, and files to pixels of one size."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedld.data.medical import is_medical, read_medical, spread
from fedld.errors import FedLDError
from fedld.paths import require_regular

Pixels = NDArray[np.uint8]
Progress = Callable[[int, int], None]
MAX_SAMPLE_VALUE = 281  # TIFF tag


def to_uint8(array: NDArray[Any], what: str) -> Pixels:
    """uint8 as it is; floats and wider integers in 0-1 (floats only) or 0-255, rounded.

    >>> to_uint8(np.array([0.0, 0.5, 1.0]), "x")
    array([  0, 128, 255], dtype=uint8)
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "fiu":
        raise FedLDError(f"{what} holds pixels of type {array.dtype}; use uint8, or floats in 0-1 or 0-255.")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if not np.isfinite([low, high]).all():
        raise FedLDError(f"{what} holds non-finite pixels.")
    if low < 0 or high > 255:
        raise FedLDError(
            f"{what} holds pixels from {low:g} to {high:g}; use uint8, or floats in 0-1 or 0-255."
        )
    scale = 255 if array.dtype.kind == "f" and high <= 1 else 1
    return np.floor(array * scale + 0.5).astype(np.uint8)


def with_channels(array: NDArray[Any], what: str) -> NDArray[Any]:
    """(N, H, W) or (N, H, W, C) with 1, 3 or 4 channels, as (N, H, W, 1 or 3); alpha is dropped."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise FedLDError(
            f"{what} has images of shape {array.shape}; use (N, H, W) or (N, H, W, C), C = 1, 3 or 4."
        )
    return array[..., :3] if array.shape[-1] == 4 else array


def fit(image: Image.Image, size: int) -> Pixels:
    """Short side to `size` (Lanczos), centre crop, RGB or grey as it comes: (size, size, C)."""
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def resize(images: Pixels, size: int) -> Pixels:
    """`fit` for an array of images."""
    if images.shape[1:3] == (size, size):
        return images
    grey = images.shape[-1] == 1
    return np.stack([fit(Image.fromarray(image[..., 0] if grey else image), size) for image in images])


def read_image(file: Path, size: int, bits: int | None = None) -> Pixels:
    """One .npy array, a scanner's file, or any file Pillow can read, as (size, size, 3).

    `bits`: how many the grey values of deep files (16-bit PNG and TIFF) really use, where they do not say.
    """
    require_regular(file)
    if is_medical(file.name):
        return fit(Image.fromarray(read_medical(file)).convert("RGB"), size)
    if file.suffix == ".npy":
        array = with_channels(np.load(file, allow_pickle=False)[None], str(file))
        image = Image.fromarray(np.broadcast_to(to_uint8(array, str(file))[0], (*array.shape[1:3], 3)))
        return fit(image, size)
    with Image.open(file) as picture:
        upright: Image.Image = ImageOps.exif_transpose(picture)
        if upright.mode.startswith(("I", "F")):  # 16-bit X-rays; Pillow's own conversion would clip them
            upright = Image.fromarray(_shallow(np.asarray(upright, np.float64), bits or _said_bits(picture)))
        return fit(upright.convert("RGB"), size)


def _said_bits(picture: Image.Image) -> int | None:
    """Bits that the file itself says its grey values use: TIFF's largest sample value."""
    largest = getattr(picture, "tag_v2", {}).get(MAX_SAMPLE_VALUE)
    largest = largest[0] if isinstance(largest, tuple) else largest
    return int(largest).bit_length() if largest else None


def _shallow(deep: NDArray[np.float64], bits: int | None) -> Pixels:
    """Grey values of up to 16 bits as 8; twelve bits read as sixteen would be almost black."""
    highest = float(deep.max())
    if bits is None and highest <= 255:
        return to_uint8(deep, "it")
    if bits is None and highest < 4096:
        raise FedLDError(
            f"its 16-bit values end at {highest:g}, as those of 12-bit scanners do: say how many bits "
            "are used, --data bits=12 (or 16)"
        )
    top = 2 ** (bits or 16) - 1
    if deep.min() < 0 or highest > top:
        raise FedLDError(f"its values from {deep.min():g} to {highest:g} are not of {bits or 16} bits")
    return spread(deep, 0.0, float(top))
