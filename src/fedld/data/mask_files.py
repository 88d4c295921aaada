"""Predicted masks as PNG files: class numbers as pixels, with a palette so that they are seen."""

import io
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedld.errors import FedLDError

COLOURS = ("#000000", "#ffd000", "#00d5ff", "#e34948", "#1baf7a", "#9085e9", "#eb6834", "#e87ba4")
"""Of the background and of the classes; they are repeated after the last one."""


def new_mask_folder(folder: Path) -> Path:
    """Make the folder for masks.

    Raises:
        FedLDError: there are files in it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FedLDError(f"the folder '{folder}' for masks is not empty")
    except OSError as error:
        raise FedLDError(f"cannot make the folder '{folder}': {error.strerror}") from None
    return folder


def mask_name(picture: str, taken: Collection[str]) -> str:
    """Name the mask of a picture: as the picture, with .png; with its whole name where that is taken.

    >>> mask_name("a/x.jpg", {}), mask_name("a/x.tif", {"a/x.png"}), mask_name("7", {})
    ('a/x.png', 'a/x.tif.png', '7.png')
    """
    file = PurePosixPath(picture).with_suffix(".png").as_posix()
    return f"{picture}.png" if file in taken else file


def mask_png(mask: NDArray[np.integer]) -> bytes:
    """Give a mask (H, W) of class numbers as a PNG file with a palette.

    >>> np.asarray(Image.open(io.BytesIO(mask_png(np.array([[0, 2]]))))).tolist()
    [[0, 2]]
    """
    picture = Image.fromarray(np.asarray(mask, np.uint8), mode="P")
    palette: list[int] = []
    for k in range(int(mask.max()) + 1):
        colour = COLOURS[0] if k == 0 else COLOURS[1 + (k - 1) % (len(COLOURS) - 1)]
        palette += [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    picture.putpalette(palette)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
