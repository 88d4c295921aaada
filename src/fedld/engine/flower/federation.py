"""Two views of one federation: a site sees its own images, the server its test set and all label counts.

Both are plain `Federation` values, so that workers, methods and records do not know that they are far apart.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data import Client, DataSpec, Federation
from fedld.data.datasets import open_table
from fedld.data.table import Table, mean_and_std
from fedld.engine.flower.wire import Description, Order
from fedld.errors import FedLDError

EMPTY = np.empty(0, np.int64)


def open_site(data: str, image_size: int | None, *, skip_bad: bool = False) -> Table:
    """A site's images: an npz file or a folder of class folders, by the path that the site itself names."""
    path = Path(data.removeprefix("npz:").removeprefix("folder:")).expanduser()
    kind = "folder:" if path.is_dir() else "npz:"
    return open_table(DataSpec(f"{kind}{path}", image_size=image_size, skip_bad=skip_bad))


def training_rows(table: Table) -> NDArray[np.int64]:
    """A site trains on all its images, unless its file or folders say that some are for testing."""
    return np.flatnonzero(np.isin(table.split, ["train", "draw"]))


def describe(table: Table, site: str, version: str, classes: Sequence[str]) -> Description:
    """What a site tells of its data: shape, numbers of images by class, and sums over all its pixels."""
    rows = training_rows(table)
    if not len(rows):
        raise FedLDError("there are no training images")
    moments = np.load(table.folder / "moments.npy", allow_pickle=False)[rows].sum(axis=0)
    images = np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    counts = np.bincount(relabel(table, classes)[rows], minlength=len(classes))
    return Description(
        site=site,
        version=version,
        shape=images.shape[1:],
        train=len(rows),
        test=int((table.split == "test").sum()),
        label_counts=counts.tolist(),
        pixel_sums=tuple(moments.tolist()),
    )


def relabel(table: Table, classes: Sequence[str]) -> NDArray[np.int64]:
    """Labels in the experiment's order of classes; a site need not have all of them, but no others."""
    other = [name for name in table.classes if name not in classes]
    if other:
        raise FedLDError(f"class '{other[0]}' is not one of the experiment's ({', '.join(classes)})")
    order = np.array([list(classes).index(name) for name in table.classes])
    labels: NDArray[np.int64] = order[table.labels]
    return labels


def site_federation(table: Table, site: str, order: Order, folder: Path) -> Federation:
    """The federation as a site sees it: itself, under its number, and nobody else."""
    nobody = Client("", EMPTY, EMPTY)
    test = np.flatnonzero(table.split == "test")
    _link(folder, table.folder / "images.npy", relabel(table, order.classes))
    return Federation(
        name=site,
        folder=folder,
        classes=tuple(order.classes),
        clients=(*(nobody,) * order.site, Client(site, training_rows(table), test)),
        test=test,
        mean=tuple(order.mean),
        std=tuple(order.std),
    )


def server_federation(table: Table, sites: Sequence[Description], folder: Path) -> Federation:
    """The federation as the server sees it: its own test images, and of every site the number of labels.

    The labels of training images follow those of the test images, class by class: their number is known,
    their order and their pixels are not.
    """
    test = np.flatnonzero(table.split == "test") if (table.split == "test").any() else training_rows(table)
    labels, clients = [table.labels], []
    start = len(table.labels)
    for site in sites:
        labels.append(np.repeat(np.arange(len(table.classes)), site.label_counts))
        own = test[table.columns["site"][test] == site.site] if "site" in table.columns else EMPTY
        clients.append(Client(site.site, np.arange(start, start + site.train), own))
        start += site.train
    _link(folder, table.folder / "images.npy", np.concatenate(labels))
    sums = np.sum([site.pixel_sums for site in sites], axis=0)
    height, width, _ = sites[0].shape
    mean, std = mean_and_std(sums, sum(site.train for site in sites) * height * width)
    return Federation("flower", folder, table.classes, tuple(clients), test, mean, std, partition="site")


def _link(folder: Path, images: Path, labels: NDArray[np.int64]) -> None:
    """A folder that a Federation reads: the pixels of a table under other labels."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{os.getpid()}.npy"  # two processes may come here at once
    aside.symlink_to(images)
    aside.replace(folder / "images.npy")
    np.save(aside, labels)
    aside.replace(folder / "labels.npy")
