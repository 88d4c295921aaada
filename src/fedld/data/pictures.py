"""Pictures to be looked at by a trained model: a file, a folder of files, or an npz file. Without labels."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from fedld.data.archive import read_arrays
from fedld.data.decode import Listed, describe_trouble
from fedld.data.folder import is_image
from fedld.data.pixels import Pixels, read_image, resize, to_uint8, with_channels
from fedld.errors import FedLDError

BATCH = 256
Shape = tuple[int, int, int]
"""Channels, height, width."""


def read_pictures(path: Path, shape: Shape, bits: int | None = None) -> Iterator[tuple[list[str], Pixels]]:
    """Names, and pixels (N, H, W, C) brought to a shape the way training data are; some pictures at a time.

    Names are paths below the folder, or rows of an npz file. A picture that cannot be read is said by name.
    """
    if path.suffix == ".npz":
        images = _archive(path, shape)
        for start in range(0, len(images), BATCH):
            part = images[start : start + BATCH]
            yield [str(start + row) for row in range(len(part))], _channels(part, shape[0])
        return
    files, below = _files(path), path if path.is_dir() else path.parent
    if shape[1] != shape[2]:
        raise FedLDError(
            f"the model wants {shape[1]} x {shape[2]} pixels: files are cut to squares, use an npz"
        )
    for start in range(0, len(files), BATCH):
        some = files[start : start + BATCH]
        images = np.stack([_read(file, shape[1], bits) for file in some])
        yield [file.relative_to(below).as_posix() for file in some], _channels(images, shape[0])


def _read(file: Path, size: int, bits: int | None) -> Pixels:
    try:
        return read_image(file, size, bits)
    except Exception as error:  # decoders raise whatever they like on damaged bytes
        raise FedLDError(describe_trouble(Listed(file), error)) from None


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise FedLDError(f"there are no pictures '{path}'")
    if not path.is_dir():
        return [path]
    files = []
    for folder, below, names in os.walk(path):
        below[:] = [name for name in below if not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files = sorted(filter(is_image, files))
    if not files:
        raise FedLDError(f"the folder '{path}' holds no pictures")
    return files


def _archive(file: Path, shape: Shape) -> Pixels:
    if not file.is_file():
        raise FedLDError(f"there are no pictures '{file}'")
    arrays = read_arrays(file, lambda name, _: name == "images")
    if "images" not in arrays:
        raise FedLDError(f"{file} has no array 'images'")
    images = to_uint8(with_channels(arrays["images"], str(file)), str(file))
    if images.shape[1:3] != shape[1:]:
        if shape[1] != shape[2]:
            found = f"{images.shape[1]} x {images.shape[2]}"
            raise FedLDError(
                f"{file} has pictures of {found} pixels, the model wants {shape[1]} x {shape[2]}"
            )
        images = resize(images, shape[1])
    return images


def _channels(images: Pixels, wanted: int) -> Pixels:
    """Grey pictures as coloured ones, or coloured ones as grey; Pillow's weights of the colours."""
    have = images.shape[-1]
    if have == wanted:
        return images
    if have == 1:
        return np.repeat(images, wanted, axis=-1)
    return np.stack([np.asarray(Image.fromarray(image).convert("L"))[..., None] for image in images])
