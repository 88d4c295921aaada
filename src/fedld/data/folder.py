"""`folder:PATH`: people's own image files, with classes or with masks.

Class folders (PATH/CLASS/image), or site and class folders (PATH/SITE/CLASS/image); above either, two folders
named train and test give the split. A file PATH/images.csv replaces all of that, for images in any folders.
Any file that Pillow reads, DICOM files and NIfTI slices.

For segmentation PATH/images and PATH/masks, or PATH/SITE/images and PATH/SITE/masks. A mask has the name of
its picture without the ending, and the picture's size.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedld.data.masks import WHITE, Masks, fit_mask, mask_targets, to_masks
from fedld.data.pixels import Listed, Progress, decode, describe_trouble, is_medical, stamps
from fedld.data.sheet import IMAGES_CSV, ImageList, read_list
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.paths import require_regular, user_path

SIZE = 96
SECONDS = 20
"""Time that a pattern of patients may take for all names."""
SEARCH = """
import json, re, sys
pattern, names = json.load(sys.stdin)
found = [re.search(pattern, name) for name in names]
json.dump([match[1] or "" if match and match.groups() else "" for match in found], sys.stdout)
"""
Row = tuple[str, str, str, Path]  # split, site, class, file


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """List the images, decode them once."""
    path = user_path(spec.dataset.removeprefix("folder:")).resolve()
    if spec.task == "segmentation":
        return open_masked(path, spec, root, progress)
    listed, notes = _list(path, spec)
    size = spec.image_size or SIZE

    def build(folder: Path) -> None:
        done = decode(folder, listed.items, size, skip_bad=spec.skip_bad, bits=spec.bits, progress=progress)
        number = {name: place for place, name in enumerate(listed.classes)}
        write_table(
            folder,
            done.images,
            np.array([number[label] for label in listed.labels], np.int64),
            listed.classes,
            split=np.where(done.good, listed.split, ""),
            columns=listed.columns | {"file": listed.files},
            partition="site" if len(set(listed.columns.get("site", ())) - {""}) > 1 else "dirichlet",
            skipped=done.skipped,
            notes=notes,
        )

    columns = {"label": listed.labels, "split": listed.split, **listed.columns}
    said_rows = {name: column.tolist() for name, column in columns.items()}
    key = fingerprint("folder", said_rows, size, spec.skip_bad, spec.bits, notes, stamps(listed.items))
    return cached(root, "folder", key, build)


def _list(path: Path, spec: DataSpec) -> tuple[ImageList, tuple[str, ...]]:
    """Find the images and what is said of them: by images.csv where there is one, else by the folders."""
    if not (path / IMAGES_CSV).is_file():
        rows, notes = list_images(path)
        files = np.array([file.relative_to(path).as_posix() for *_, file in rows])
        split, site, kind = (np.array(column) for column in list(zip(*rows, strict=True))[:3])
        columns = {"site": site} if any(site) else {}
        columns |= name_patients([file for *_, file in rows], spec.patient)
        items = [Listed(file) for *_, file in rows]
        return ImageList(
            items, files, kind, split, columns=columns, classes=tuple(map(str, np.unique(kind)))
        ), notes
    listed = read_list(path)
    if spec.patient is not None:
        if "patient" in listed.columns:
            raise FedLDError(
                f"{path / IMAGES_CSV} has a column 'patient': leave the pattern '{spec.patient}' out"
            )
        patients = name_patients([item.file for item in listed.items], spec.patient)
        listed = listed._replace(columns=listed.columns | patients)
    return listed, tuple(_unlisted(path, set(listed.files.tolist())))


def _unlisted(path: Path, listed: set[str]) -> Iterator[str]:
    """Say how many images below a folder are not in its images.csv."""
    others = [
        file
        for folder, _, names in sorted(os.walk(path))
        for file in (Path(folder, name) for name in sorted(names))
        if file.relative_to(path).as_posix() not in listed and is_image(file)
    ]
    if others:
        yield f"{len(others)} images are not in {IMAGES_CSV} and are not read, the first is {others[0]}"


def name_patients(files: list[Path], pattern: str | None) -> dict[str, Text]:
    """Read the patient from each file's name, as a column; empty without a pattern."""
    if pattern is None:
        return {}
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FedLDError(f"The pattern '{pattern}' of patients is none: {error}") from None
    patients = _first_groups(pattern, [file.name for file in files])
    for file, patient in zip(files, patients, strict=True):
        if not patient:
            raise FedLDError(f"The pattern '{pattern}' finds no patient in the name of {file}")
    return {"patient": np.array(patients)}


def _first_groups(pattern: str, names: list[str]) -> list[str]:
    """Find the first group of a pattern in every name, in a process that can be stopped.

    Some patterns, such as `(a+)+b`, take longer than anybody lives on the wrong name.
    """
    command = [sys.executable, "-I", "-c", SEARCH]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, names]), text=True, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise FedLDError(
            f"The pattern '{pattern}' of patients is not done with {len(names)} names after {SECONDS} s"
        ) from None
    if done.returncode:
        raise FedLDError(f"The pattern '{pattern}' of patients failed: {done.stderr.strip()[-200:]!r}")
    groups: list[str] = json.loads(done.stdout)
    return groups


def list_images(path: Path) -> tuple[list[Row], tuple[str, ...]]:
    """List all images below `path`, sorted, with the split, site and class of their folders.

    And notes on what lies beside them and is not read.
    """
    if not path.is_dir():
        raise FedLDError(f"There is no folder {path}")
    top = folders_in(path)
    splits = [("draw", path)]
    if {folder.name for folder in top} == {"train", "test"}:
        splits = [(folder.name, folder) for folder in top]
    rows: list[Row] = []
    for split, below in splits:
        for folder in folders_in(below):
            rows += [(split, "", folder.name, file) for file in images_in(folder)]
            for kind in folders_in(folder):
                rows += [(split, folder.name, kind.name, file) for file in images_in(kind)]
    _check(rows, path)
    return rows, tuple(_ignored({file.parent for *_, file in rows}))


def _ignored(folders: set[Path]) -> Iterator[str]:
    """Note files beside the images that are no images, and links that lead nowhere."""
    others = [entry for folder in sorted(folders) for entry in _entries(folder) if not os.path.isdir(entry)]
    dangling = [entry for entry in others if not entry.exists()]
    ignored = [entry for entry in others if entry not in dangling and not is_image(entry)]
    if dangling:
        yield f"{len(dangling)} links lead nowhere, the first is {dangling[0]}"
    if ignored:
        yield f"{len(ignored)} files are no images and are not read, the first is {ignored[0]}"


def _check(rows: list[Row], path: Path) -> None:
    if not rows:
        raise FedLDError(f"{path} holds no images in class folders (CLASS/image) or SITE/CLASS/image")
    named = {bool(site) for _, site, _, _ in rows}
    if len(named) > 1:
        raise FedLDError(f"{path} mixes class folders and site/class folders; use one of the two")


def folders_in(path: Path) -> list[Path]:
    """Give the folders in a folder, sorted."""
    return [entry for entry in _entries(path) if os.path.isdir(entry)]


def images_in(path: Path) -> list[Path]:
    """Give the picture files in a folder, sorted."""
    return [entry for entry in _entries(path) if is_image(entry)]


def is_image(entry: Path) -> bool:
    """Tell whether a file has the name of a picture that can be read."""
    readable = entry.suffix.lower() in Image.registered_extensions() or is_medical(entry.name)
    return readable and os.path.isfile(entry)


def _entries(path: Path) -> list[Path]:
    """List what lies in a folder and is not hidden, sorted."""
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise FedLDError(f"The folder {path} cannot be read: {error.strerror}") from None


MaskedRow = tuple[str, str, Path, Path]  # split, site, picture, mask


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


def list_masked(path: Path) -> list[MaskedRow]:
    """Give all pictures below a folder with their masks, sorted.

    Raises:
        FedLDError: there is no such folder or no picture in it, or a picture has no mask.
    """
    if not path.is_dir():
        raise FedLDError(f"There is no folder {path}")
    splits = [("draw", path)]
    if {folder.name for folder in folders_in(path)} == {"train", "test"}:
        splits = [(folder.name, folder) for folder in folders_in(path)]
    rows: list[MaskedRow] = []
    for split, below in splits:
        rows += _pairs(split, "", below)
        for folder in folders_in(below):
            rows += _pairs(split, folder.name, folder)
    if not rows:
        raise FedLDError(
            f"{path} holds no pictures in images/ with masks/, or in SITE/images with SITE/masks"
        )
    return rows


def _pairs(split: str, site: str, folder: Path) -> list[MaskedRow]:
    """Pair pictures and masks of one folder; empty unless it has both."""
    if not (folder / "images").is_dir() or not (folder / "masks").is_dir():
        return []
    masks = {file.stem: file for file in images_in(folder / "masks")}
    rows = []
    for picture in images_in(folder / "images"):
        if picture.stem not in masks:
            raise FedLDError(f"{picture} has no mask of its name in {folder / 'masks'}")
        rows.append((split, site, picture, masks[picture.stem]))
    return rows


def _read_mask(picture: Path, file: Path, size: int) -> Masks:
    """Read one mask, scaled and cropped as its picture is."""
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
    """Read width and height of a picture; None where Pillow cannot."""
    try:
        with Image.open(picture) as image:
            return ImageOps.exif_transpose(image).size
    except Exception:  # decoding reports damaged pictures
        return None


def _whites_as_ones(masks: list[Masks]) -> list[Masks]:
    """Replace 255 by 1 in masks of 0 and 255 alone: in all of them or in none."""
    if all(set(np.unique(mask)) <= {0, WHITE} for mask in masks):
        return [(mask == WHITE).astype(np.uint8) for mask in masks]
    return masks
