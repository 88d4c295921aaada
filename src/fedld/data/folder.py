"""`folder:PATH`: people's own image files.

Class folders (PATH/CLASS/image), or site and class folders (PATH/SITE/CLASS/image); above either, two folders
named train and test give the split. A file PATH/images.csv replaces all of that, for images in any folders.
Any file that Pillow reads, DICOM files and NIfTI slices.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from fedld.data.decode import Listed, decode, stamps
from fedld.data.listing import NAME, ImageList, read_list
from fedld.data.medical import is_medical
from fedld.data.pixels import Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.paths import user_path

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
        from fedld.data.mask_folder import open_masked

        return open_masked(path, spec, root, progress)
    found, notes = _list(path, spec)
    size = spec.image_size or SIZE

    def build(folder: Path) -> None:
        done = decode(folder, found.items, size, skip_bad=spec.skip_bad, bits=spec.bits, progress=progress)
        number = {name: place for place, name in enumerate(found.classes)}
        write_table(
            folder,
            done.images,
            np.array([number[label] for label in found.labels], np.int64),
            found.classes,
            split=np.where(done.good, found.split, ""),
            columns=found.columns | {"file": found.files},
            partition="site" if len(set(found.columns.get("site", ())) - {""}) > 1 else "dirichlet",
            skipped=done.skipped,
            notes=notes,
        )

    said = {"label": found.labels, "split": found.split, **found.columns}
    said_rows = {name: column.tolist() for name, column in said.items()}
    key = fingerprint("folder", said_rows, size, spec.skip_bad, spec.bits, notes, stamps(found.items))
    return cached(root, "folder", key, build)


def _list(path: Path, spec: DataSpec) -> tuple[ImageList, tuple[str, ...]]:
    """Find the images and what is said of them: by images.csv where there is one, else by the folders."""
    if not (path / NAME).is_file():
        rows, notes = list_images(path)
        files = np.array([file.relative_to(path).as_posix() for *_, file in rows])
        split, site, kind = (np.array(column) for column in list(zip(*rows, strict=True))[:3])
        columns = {"site": site} if any(site) else {}
        columns |= name_patients([file for *_, file in rows], spec.patient)
        items = [Listed(file) for *_, file in rows]
        return ImageList(items, files, kind, split, columns, tuple(map(str, np.unique(kind)))), notes
    listed = read_list(path)
    if spec.patient is not None:
        if "patient" in listed.columns:
            raise FedLDError(f"{path / NAME} has a column 'patient': leave the pattern '{spec.patient}' out.")
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
        yield f"{len(others)} images are not in {NAME} and are not read, the first is {others[0]}"


def name_patients(files: list[Path], pattern: str | None) -> dict[str, Text]:
    """The patient that each file's name says, as a column; none where there is no pattern."""
    if pattern is None:
        return {}
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FedLDError(f"The pattern '{pattern}' of patients is none: {error}.") from None
    found = _first_groups(pattern, [file.name for file in files])
    for file, patient in zip(files, found, strict=True):
        if not patient:
            raise FedLDError(f"The pattern '{pattern}' finds no patient in the name of {file}.")
    return {"patient": np.array(found)}


def _first_groups(pattern: str, names: list[str]) -> list[str]:
    """What the first group of a pattern finds in every name, in a process that can be stopped.

    Some patterns, such as `(a+)+b`, take longer than anybody lives on the wrong name.
    """
    command = [sys.executable, "-I", "-c", SEARCH]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, names]), text=True, capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise FedLDError(
            f"The pattern '{pattern}' of patients is not done with {len(names)} names after {SECONDS} s."
        ) from None
    if done.returncode:
        raise FedLDError(f"The pattern '{pattern}' of patients failed: {done.stderr.strip()[-200:]!r}.")
    found: list[str] = json.loads(done.stdout)
    return found


def list_images(path: Path) -> tuple[list[Row], tuple[str, ...]]:
    """All images below `path`, sorted, with the split, site and class that their folders say.

    And notes on what lies beside them and is not read.
    """
    if not path.is_dir():
        raise FedLDError(f"There is no folder {path}.")
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
    """Files beside the images that are none, and links that lead nowhere."""
    others = [entry for folder in sorted(folders) for entry in _entries(folder) if not os.path.isdir(entry)]
    dangling = [entry for entry in others if not entry.exists()]
    ignored = [entry for entry in others if entry not in dangling and not is_image(entry)]
    if dangling:
        yield f"{len(dangling)} links lead nowhere, the first is {dangling[0]}"
    if ignored:
        yield f"{len(ignored)} files are no images and are not read, the first is {ignored[0]}"


def _check(rows: list[Row], path: Path) -> None:
    if not rows:
        raise FedLDError(f"{path} holds no images in class folders (CLASS/image) or SITE/CLASS/image.")
    named = {bool(site) for _, site, _, _ in rows}
    if len(named) > 1:
        raise FedLDError(f"{path} mixes class folders and site/class folders; use one of the two.")


def folders_in(path: Path) -> list[Path]:
    """Give the folders in a folder, sorted."""
    return [entry for entry in _entries(path) if os.path.isdir(entry)]


def images_in(path: Path) -> list[Path]:
    """Give the picture files in a folder, sorted."""
    return [entry for entry in _entries(path) if is_image(entry)]


def is_image(entry: Path) -> bool:
    """Whether a file is called like a picture that can be read."""
    known = entry.suffix.lower() in Image.registered_extensions() or is_medical(entry.name)
    return known and os.path.isfile(entry)


def _entries(path: Path) -> list[Path]:
    """What lies in a folder and is not hidden, sorted."""
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise FedLDError(f"The folder {path} cannot be read: {error.strerror}.") from None
