"""`folder:PATH` for segmentation: PATH/images and PATH/masks, or PATH/SITE/images and PATH/SITE/masks.

A mask has the name of its picture without the ending, and the picture's size. Above either, two folders named
train and test give the split.
"""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedld.data.decode import Listed, decode, describe_trouble, stamps
from fedld.data.folder import SIZE, folders_in, images_in, name_patients
from fedld.data.masks import WHITE, Masks, fit_mask, mask_targets, to_masks
from fedld.data.medical import is_medical
from fedld.data.pixels import Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.paths import require_regular

Row = tuple[str, str, Path, Path]  # split, site, picture, mask


def open_masked(path: Path, spec: DataSpec, root: Path, progress: Progress | None) -> Table:
    """List pictures and masks, decode them once."""
    rows = list_masked(path)
    size = spec.image_size or SIZE
    pictures = [Listed(picture) for *_, picture, _ in rows]
    patients = name_patients([item.file for item in pictures], spec.patient)

    def build(folder: Path) -> None:
        masks = _whites_as_ones([_read_mask(picture, mask, size) for *_, picture, mask in rows])
        for (*_, file), mask in zip(rows, masks, strict=True):
            to_masks(mask[None], (1, size, size), str(file))
        done = decode(folder, pictures, size, skip_bad=spec.skip_bad, bits=spec.bits, progress=progress)
        made = mask_targets(np.stack(masks).astype(np.uint8), None, str(path))
        split, site = (np.array(column) for column in list(zip(*rows, strict=True))[:2])
        files = np.array([item.file.relative_to(path).as_posix() for item in pictures])
        columns = {"group": made.groups.astype(np.str_), "file": files} | patients
        sites = set(site) - {""}
        write_table(
            folder,
            done.images,
            made.values,
            made.outputs,
            split=np.where(done.good, split, ""),
            columns=columns | ({"site": site} if sites else {}),
            partition="site" if len(sites) > 1 else "dirichlet",
            skipped=done.skipped,
            task=spec.task,
            groups=made.names,
        )

    files = [*pictures, *(Listed(mask) for *_, mask in rows)]
    key = fingerprint("folder of masks", size, spec.skip_bad, spec.bits, spec.patient, stamps(files))
    return cached(root, "folder", key, build)


def list_masked(path: Path) -> list[Row]:
    """Give all pictures below a folder with their masks, sorted.

    Raises:
        FedLDError: there is no such folder or no picture in it, or a picture has no mask.
    """
    if not path.is_dir():
        raise FedLDError(f"There is no folder {path}.")
    splits = [("draw", path)]
    if {folder.name for folder in folders_in(path)} == {"train", "test"}:
        splits = [(folder.name, folder) for folder in folders_in(path)]
    rows: list[Row] = []
    for split, below in splits:
        rows += _pairs(split, "", below)
        for folder in folders_in(below):
            rows += _pairs(split, folder.name, folder)
    if not rows:
        raise FedLDError(
            f"{path} holds no pictures in images/ with masks/, or in SITE/images with SITE/masks."
        )
    return rows


def _pairs(split: str, site: str, folder: Path) -> list[Row]:
    """Pictures and masks of one folder; none where it has not both."""
    if not (folder / "images").is_dir() or not (folder / "masks").is_dir():
        return []
    masks = {file.stem: file for file in images_in(folder / "masks")}
    rows = []
    for picture in images_in(folder / "images"):
        if picture.stem not in masks:
            raise FedLDError(f"{picture} has no mask of its name in {folder / 'masks'}.")
        rows.append((split, site, picture, masks[picture.stem]))
    return rows


def _read_mask(picture: Path, file: Path, size: int) -> Masks:
    """One mask, scaled and cropped as its picture is."""
    try:
        require_regular(file)
        with Image.open(file) as mask:
            if mask.mode not in ("1", "L", "P", "I", "I;16"):
                raise FedLDError("a mask is one channel of class numbers")
            if not is_medical(picture.name) and (wanted := _size(picture)) not in (None, mask.size):
                raise FedLDError(f"it has {mask.size} pixels, and its picture {wanted}")
            values = np.asarray(mask).astype(np.int32) * (WHITE if mask.mode == "1" else 1)
    except Exception as error:  # decoders raise whatever they like on damaged bytes
        raise FedLDError(describe_trouble(Listed(file), error)) from None
    return fit_mask(Image.fromarray(values.clip(0, 2**31 - 1)), size)


def _size(picture: Path) -> tuple[int, int] | None:
    """Width and height of a picture; None where Pillow cannot tell."""
    try:
        with Image.open(picture) as image:
            return ImageOps.exif_transpose(image).size
    except Exception:  # damaged pictures are told of by whoever decodes them
        return None


def _whites_as_ones(masks: list[Masks]) -> list[Masks]:
    """Masks of 0 and 255 alone, as pictures have them, become 0 and 1: all of them or none."""
    if all(set(np.unique(mask)) <= {0, WHITE} for mask in masks):
        return [(mask == WHITE).astype(np.uint8) for mask in masks]
    return masks
