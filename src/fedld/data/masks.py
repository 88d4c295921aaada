"""Masks: a class number for every pixel of a picture; their groups, and files of predicted masks."""

import io
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedld.data.targets import QUARTERS, Targets
from fedld.errors import FedLDError

MOST_MASK_CLASSES = 21
"""With the background, which is class 0: a tally has room for three sums of each of the 20 others."""
WHITE = 255
Masks = NDArray[np.uint8]


def to_masks(values: NDArray[Any], shape: tuple[int, ...], what: str) -> Masks:
    """Check masks; those of 0 and 255 alone, as pictures have them, become 0 and 1.

    Args:
        values: (N, H, W) class numbers.
        shape: that they must have.
        what: the source, for sentences.

    Raises:
        FedLDError: masks of another size, or values that are no class numbers; the row is named.

    >>> to_masks(np.array([[[0, 255]]]), (1, 1, 2), "eyes.npz").tolist()
    [[[0, 1]]]
    """
    if values.ndim == 4 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.shape != shape:
        raise FedLDError(f"{what} has masks of shape {values.shape}, its pictures need {shape}")
    if values.dtype.kind not in "fiub":
        raise FedLDError(f"{what} has masks of {values.dtype}: they are class numbers from 0")
    if values.dtype.kind == "f" and values.size:
        _refuse(~(np.isfinite(values) & (values == np.floor(values))), values, what, "is no whole number")
    if values.size and values.max() == WHITE and np.isin(values, (0, WHITE)).all():
        values = values == WHITE
    wrong = (values < 0) | (values >= MOST_MASK_CLASSES)
    _refuse(wrong, values, what, f"is no class: they count from 0, {MOST_MASK_CLASSES} are the most")
    return values.astype(np.uint8)


def _refuse(wrong: NDArray[np.bool_], values: NDArray[Any], what: str, why: str) -> None:
    rows = np.flatnonzero(wrong.any(axis=(1, 2)))
    if len(rows):
        row = int(rows[0])
        raise FedLDError(
            f"{what}, row {row + 1}: the mask has the value {values[row][wrong[row]][0]:g}, which {why}"
        )


def mask_targets(masks: Masks, classes: Sequence[str] | None, what: str) -> Targets:
    """Name the classes of masks and group pictures by the share of pixels that is marked.

    Raises:
        FedLDError: a mask has a class that is not named, or nothing is marked at all.
    """
    highest = int(masks.max(initial=0))
    names = tuple(classes or ())
    if not names:
        names = (
            ("background", "foreground") if highest < 2 else ("background", *map(str, range(1, highest + 1)))
        )
    if not 2 <= len(names) <= MOST_MASK_CLASSES or len(set(names)) < len(names):
        raise FedLDError(f"{what}: masks have 2 to {MOST_MASK_CLASSES} different classes with the background")
    wrong = masks >= len(names)
    _refuse(wrong, masks, what, f"is none of the {len(names)} classes {', '.join(names)}")
    if not highest:
        raise FedLDError(f"{what} has masks in which nothing is marked")
    share = (masks > 0).mean(axis=(1, 2))
    cuts = np.unique(np.quantile(share, np.arange(1, QUARTERS) / QUARTERS))
    groups = np.searchsorted(cuts, share, side="right").astype(np.int64)
    labels = [f"marked below {cuts[0]:.1%}", *(f"marked from {cut:.1%}" for cut in cuts)]
    return Targets(masks, names, groups, tuple(labels))


def resize_masks(masks: Masks, size: int) -> Masks:
    """Scale and crop masks (N, H, W) as pictures are, each pixel taking the class of the nearest one."""
    if masks.shape[1:] == (size, size):
        return masks
    return np.stack([fit_mask(Image.fromarray(mask), size) for mask in masks])


def fit_mask(mask: Image.Image, size: int) -> Masks:
    """Scale the short side to `size` and crop around the centre: (size, size)."""
    fitted: Masks = np.asarray(ImageOps.fit(mask, (size, size), Image.Resampling.NEAREST))
    return fitted


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
