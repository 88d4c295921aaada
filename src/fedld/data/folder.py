"""`folder:PATH`: people's own image files.

Class folders (PATH/CLASS/image), or site and class folders (PATH/SITE/CLASS/image); above either, two folders
named train and test give the split. Any file that Pillow reads.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from fedld.data.decode import Listed, decode, stamps
from fedld.data.pixels import Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError

SIZE = 96
Row = tuple[str, str, str, Path]  # split, site, class, file


def open_table(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """List the images, decode them once."""
    path = Path(spec.dataset.removeprefix("folder:")).expanduser().resolve()
    rows = list_images(path)
    size = spec.image_size or SIZE
    items = [Listed(file) for *_, file in rows]

    def build(folder: Path) -> None:
        done = decode(folder, items, size, skip_bad=spec.skip_bad, progress=progress)
        split, site, kind = (np.array(column) for column in list(zip(*rows, strict=True))[:3])
        classes, labels = np.unique(kind, return_inverse=True)
        sites = set(site) - {""}
        write_table(
            folder,
            done.images,
            labels.astype(np.int64),
            tuple(map(str, classes)),
            split=np.where(done.good, split, ""),
            columns={"site": site} if sites else {},
            partition="site" if len(sites) > 1 else "dirichlet",
            skipped=done.skipped,
        )

    return cached(root, "folder", fingerprint("folder", size, spec.skip_bad, stamps(items)), build)


def list_images(path: Path) -> list[Row]:
    """All images below `path`, sorted, with the split, site and class that their folders say."""
    if not path.is_dir():
        raise FedLDError(f"There is no folder {path}.")
    top = _folders(path)
    splits = [("draw", path)]
    if {folder.name for folder in top} == {"train", "test"}:
        splits = [(folder.name, folder) for folder in top]
    rows: list[Row] = []
    for split, below in splits:
        for folder in _folders(below):
            rows += [(split, "", folder.name, file) for file in _images(folder)]
            for kind in _folders(folder):
                rows += [(split, folder.name, kind.name, file) for file in _images(kind)]
    _check(rows, path)
    return rows


def _check(rows: list[Row], path: Path) -> None:
    if not rows:
        raise FedLDError(f"{path} holds no images in class folders (CLASS/image) or SITE/CLASS/image.")
    named = {bool(site) for _, site, _, _ in rows}
    if len(named) > 1:
        raise FedLDError(f"{path} mixes class folders and site/class folders; use one of the two.")
    if len({kind for _, _, kind, _ in rows}) < 2:
        raise FedLDError(f"{path} holds only one class, '{rows[0][2]}'.")


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(path: Path) -> list[Path]:
    readable = Image.registered_extensions()
    return sorted(
        entry
        for entry in path.iterdir()
        if entry.is_file() and not entry.name.startswith(".") and entry.suffix.lower() in readable
    )
