"""Files of scanners: DICOM by pydicom (extra `dicom`), NIfTI slices by their header, as grey or RGB pixels.

A file holds one picture. Its grey values are spread over 0-255 by what the file itself says of them: the
window that the scanner chose, the stored bits, or for NIfTI the display range.
"""

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError

Pixels = NDArray[np.uint8]
DICOM = (".dcm", ".dicom")
NIFTI = (".nii", ".nii.gz")
NIFTI_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


def is_medical(name: str) -> bool:
    """Whether a file name ends like one of a scanner.

    >>> is_medical("scan.NII.gz"), is_medical("scan.png")
    (True, False)
    """
    return name.lower().endswith(DICOM + NIFTI)


def read_medical(file: Path) -> Pixels:
    """Pixels (H, W) or (H, W, 3) of a DICOM or NIfTI file."""
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
    """Smallest and largest value that the stored bits can mean, after the rescale; windows map onto it."""
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
    """One slice: rescaled, spread over the display range of the header, else over its own values."""
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


@dataclass(frozen=True)
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
        shape[0],
        shape[1],
        np.dtype(NIFTI_TYPES[kind]).newbyteorder(order),
        int(offset),
        slope if scaled else 1.0,
        intercept if scaled else 0.0,
        (low, high) if math.isfinite(low) and low < high < math.inf else None,
    )


def spread(values: NDArray[np.float64], low: float, high: float) -> Pixels:
    """Values from `low` to `high` as 0 to 255.

    >>> spread(np.array([0.0, 2048.0, 4095.0]), 0, 4095)
    array([  0, 128, 255], dtype=uint8)
    """
    if not np.isfinite(values).all():
        raise FedLDError("it holds values that are no numbers")
    share = (values - low) / (high - low) if high > low else np.zeros_like(values)
    return np.floor(share.clip(0, 1) * 255 + 0.5).astype(np.uint8)
