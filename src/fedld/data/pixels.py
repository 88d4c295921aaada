"""Files to pixels: images, .npy arrays, DICOM (extra `dicom`) and NIfTI slices as uint8 of one size.

A scanner's file holds one picture. Its grey values are spread over 0-255 by what the file itself states: the
window that the scanner chose, the stored bits, or for NIfTI the display range.
"""

import gzip
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedld.errors import FedLDError
from fedld.paths import require_regular

Pixels = NDArray[np.uint8]
Progress = Callable[[int, int], None]
MAX_SAMPLE_VALUE = 281  # TIFF tag


def to_uint8(array: NDArray[Any], what: str) -> Pixels:
    """Convert to uint8: floats and wider integers in 0-1 (floats only) or 0-255, rounded.

    >>> to_uint8(np.array([0.0, 0.5, 1.0]), "x")
    array([  0, 128, 255], dtype=uint8)
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind not in "fiu":
        raise FedLDError(f"{what} holds pixels of type {array.dtype}; use uint8, or floats in 0-1 or 0-255")
    low, high = (float(array.min()), float(array.max())) if array.size else (0.0, 0.0)
    if not np.isfinite([low, high]).all():
        raise FedLDError(f"{what} holds non-finite pixels")
    if low < 0 or high > 255:
        raise FedLDError(
            f"{what} holds pixels from {low:g} to {high:g}; use uint8, or floats in 0-1 or 0-255"
        )
    scale = 255 if array.dtype.kind == "f" and high <= 1 else 1
    return np.floor(array * scale + 0.5).astype(np.uint8)


def with_channels(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Reshape (N, H, W) or (N, H, W, C), C = 1, 3 or 4, to (N, H, W, 1 or 3); alpha is dropped."""
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or 0 in array.shape:
        raise FedLDError(
            f"{what} has images of shape {array.shape}; use (N, H, W) or (N, H, W, C), C = 1, 3 or 4"
        )
    return array[..., :3] if array.shape[-1] == 4 else array


def fit(image: Image.Image, size: int) -> Pixels:
    """Scale the short side to `size` (Lanczos) and crop the centre, RGB or grey: (size, size, C)."""
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def resize(images: Pixels, size: int) -> Pixels:
    """Apply `fit` to an array of images."""
    if images.shape[1:3] == (size, size):
        return images
    grey = images.shape[-1] == 1
    return np.stack([fit(Image.fromarray(image[..., 0] if grey else image), size) for image in images])


def read_image(file: Path, size: int, bits: int | None = None) -> Pixels:
    """Read one .npy array, a scanner's file, or any file Pillow can read, as (size, size, 3).

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
    """Read how many bits the grey values of the file use: TIFF's largest sample value."""
    largest = getattr(picture, "tag_v2", {}).get(MAX_SAMPLE_VALUE)
    largest = largest[0] if isinstance(largest, tuple) else largest
    return int(largest).bit_length() if largest else None


def _shallow(deep: NDArray[np.float64], bits: int | None) -> Pixels:
    """Convert grey values of up to 16 bits to 8; twelve bits read as sixteen would be almost black."""
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


DICOM = (".dcm", ".dicom")
NIFTI = (".nii", ".nii.gz")
NIFTI_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


def is_medical(name: str) -> bool:
    """Tell whether a file name ends like one of a scanner.

    >>> is_medical("scan.NII.gz"), is_medical("scan.png")
    (True, False)
    """
    return name.lower().endswith(DICOM + NIFTI)


def read_medical(file: Path) -> Pixels:
    """Read pixels (H, W) or (H, W, 3) of a DICOM or NIfTI file."""
    return read_dicom(file) if file.name.lower().endswith(DICOM) else read_nifti(file)


def read_dicom(file: Path) -> Pixels:
    """Rescale, window, and turn round what is stored with white as zero (MONOCHROME1)."""
    try:
        from pydicom import dcmread
        from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
    except ImportError:
        raise FedLDError(f"{file} is a DICOM file, which needs pydicom: pip install 'fedld[dicom]'") from None
    data = dcmread(file)
    if int(data.get("NumberOfFrames") or 1) > 1:
        raise FedLDError(f"it has {data.NumberOfFrames} frames: export them as files of one picture each")
    stored = data.pixel_array
    if data.PhotometricInterpretation not in ("MONOCHROME1", "MONOCHROME2"):
        return _colour(stored, data)
    values = np.asarray(apply_modality_lut(stored, data), np.float64)
    low, high = _stored_range(data)
    if "WindowWidth" in data or "VOILUTSequence" in data:
        values = np.asarray(apply_voi_lut(apply_modality_lut(stored, data), data), np.float64)
        low, high = (float(values.min()), float(values.max())) if "VOILUTSequence" in data else (low, high)
    grey = spread(values, low, high)
    return 255 - grey if data.PhotometricInterpretation == "MONOCHROME1" else grey


def _stored_range(data: Any) -> tuple[float, float]:
    """Compute the smallest and largest value of the stored bits after the rescale; windows map onto it."""
    bits, signed = int(data.BitsStored), bool(data.PixelRepresentation)
    ends = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1], np.float64)
    ends = ends * float(data.get("RescaleSlope", 1)) + float(data.get("RescaleIntercept", 0))
    return float(ends.min()), float(ends.max())


def _colour(stored: NDArray[Any], data: Any) -> Pixels:
    kind = str(data.PhotometricInterpretation)
    if kind != "RGB" or stored.ndim != 3 or stored.dtype != np.uint8:
        raise FedLDError(f"its pixels are {kind} of {data.BitsStored} bits: use grey or RGB of 8 bits")
    return np.asarray(stored)


def read_nifti(file: Path) -> Pixels:
    """Read one slice: rescaled, spread over the display range of the header, else over its own values."""
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as stream:
        slice_ = _slice(stream.read(352))
        stream.read(slice_.offset - 352)
        content = stream.read(slice_.length)
    if len(content) < slice_.length:
        raise FedLDError("it is shorter than its header says")
    values = np.frombuffer(content, slice_.dtype).astype(np.float64).reshape(slice_.height, slice_.width)
    values = values * slice_.slope + slice_.intercept
    low, high = slice_.display or (float(values.min()), float(values.max()))
    return spread(values, low, high)[::-1]  # rows are stored from the feet up


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """What a NIfTI-1 header says."""

    width: int
    height: int
    dtype: np.dtype[Any]
    offset: int
    slope: float
    intercept: float
    display: tuple[float, float] | None

    @property
    def length(self) -> int:
        return self.width * self.height * self.dtype.itemsize


def _slice(head: bytes) -> _Slice:
    order: Literal["<", ">"] = "<" if head[:4] == struct.pack("<i", 348) else ">"
    if len(head) < 352 or struct.unpack(f"{order}i", head[:4]) != (348,) or head[344:347] != b"n+1":
        raise FedLDError("it has no NIfTI-1 header")
    dims, (kind,) = struct.unpack(f"{order}8h", head[40:56]), struct.unpack(f"{order}h", head[70:72])
    offset, slope, intercept = struct.unpack(f"{order}3f", head[108:120])
    high, low = struct.unpack(f"{order}2f", head[124:132])
    shape = dims[1 : 1 + dims[0]]
    if not 2 <= dims[0] <= 7 or min(shape) < 1 or kind not in NIFTI_TYPES:
        raise FedLDError(f"its header names shape {shape} and type {kind}")
    if max(shape[2:], default=1) > 1:
        raise FedLDError(f"it is a volume of shape {shape}: export its slices, one file each")
    if not 352 <= offset <= 1 << 20:
        raise FedLDError(f"its header says that the pixels begin at byte {offset:g}")
    scaled = slope != 0 and math.isfinite(slope) and math.isfinite(intercept)
    return _Slice(
        width=shape[0],
        height=shape[1],
        dtype=np.dtype(NIFTI_TYPES[kind]).newbyteorder(order),
        offset=int(offset),
        slope=slope if scaled else 1.0,
        intercept=intercept if scaled else 0.0,
        display=(low, high) if math.isfinite(low) and low < high < math.inf else None,
    )


def spread(values: NDArray[np.float64], low: float, high: float) -> Pixels:
    """Map values from `low` to `high` to 0 to 255.

    >>> spread(np.array([0.0, 2048.0, 4095.0]), 0, 4095)
    array([  0, 128, 255], dtype=uint8)
    """
    if not np.isfinite(values).all():
        raise FedLDError("it holds values that are no numbers")
    share = (values - low) / (high - low) if high > low else np.zeros_like(values)
    return np.floor(share.clip(0, 1) * 255 + 0.5).astype(np.uint8)


@dataclass(frozen=True)
class Listed:
    """An image file and where it is listed ('train.csv line 7'), for a message that finds it."""

    file: Path
    where: str = ""

    def __str__(self) -> str:
        return f"{self.file} ({self.where})" if self.where else str(self.file)


@dataclass(frozen=True, eq=False)
class Decoded:
    """The pixels, which rows are good, and what was wrong with the others."""

    images: Pixels
    good: NDArray[np.bool_]
    skipped: tuple[str, ...]


def stamps(items: Iterable[Listed]) -> list[tuple[str, int, int]]:
    """List path, size and time of change (-1: missing) of every file, for the cache's fingerprint."""
    return [(str(item.file), *_stamp(item.file)) for item in items]


def decode(
    folder: Path,
    items: Sequence[Listed],
    size: int,
    *,
    skip_bad: bool = False,
    bits: int | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """Read every file into `folder`/images.npy at `size` x `size` x 3.

    Threads are enough: Pillow and NumPy release the interpreter lock while they decode and resize. A damaged
    or missing file ends it with its name, or with `skip_bad` leaves a black row that is not used.
    """
    images = np.lib.format.open_memmap(
        folder / "images.npy", mode="w+", dtype=np.uint8, shape=(len(items), size, size, 3)
    )

    def read(row: int) -> str:
        try:
            images[row] = read_image(items[row].file, size, bits)
        except Exception as error:  # decoders raise whatever they like on damaged bytes
            return describe_trouble(items[row], error)
        return ""

    wrong: list[str] = []
    executor = ThreadPoolExecutor(os.cpu_count())
    try:
        for done, trouble in enumerate(executor.map(read, range(len(items))), start=1):
            wrong.append(trouble)
            if trouble and not skip_bad:
                raise FedLDError(trouble)
            if progress is not None:
                progress(done, len(items))
    finally:
        executor.shutdown(cancel_futures=True)
    return Decoded(images, np.array([not text for text in wrong]), tuple(filter(None, wrong)))


def describe_trouble(item: Listed, error: Exception) -> str:
    """Explain in one sentence why a file cannot be used."""
    if isinstance(error, FileNotFoundError):
        return f"{item} is missing"
    if isinstance(error, FedLDError):
        return f"{item} is not usable: {error}"
    return f"{item} is damaged: {' '.join(str(error).split()).rstrip('.')}"


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
