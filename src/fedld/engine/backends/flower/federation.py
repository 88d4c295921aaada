"""Two views of one federation: a site sees its own images, the server its test set and all label counts.

Both are plain `Federation` values, so that workers, methods and records do not know that they are far apart;
at the server the clients' training images are `elsewhere`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data import Client, DataSpec, Federation
from fedld.data.datasets import open_table
from fedld.data.table import Table, mean_and_std
from fedld.engine.backends.flower.wire import Description, Order
from fedld.errors import FedLDError
from fedld.records.writer import write_atomically

EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True)
class FileFacts:
    """What a site says of its files: the bits that 16-bit ones use, a pattern for the patient in a name.

    An empty value says nothing.
    """

    skip_bad: bool = False
    bits: int = 0
    patient: str = ""

    def told(self) -> dict[str, Any]:
        """As a node configuration."""
        return {"skip-bad": self.skip_bad, "bits": self.bits, "patient": self.patient}

    @classmethod
    def from_node(cls, config: Mapping[str, Any]) -> "FileFacts":
        """From a site's own node configuration."""
        skip_bad, bits = bool(config.get("skip-bad", False)), int(config.get("bits", 0))
        return cls(skip_bad, bits, str(config.get("patient", "")))


PLAIN = FileFacts()


def open_site(data: str, image_size: int | None, facts: FileFacts = PLAIN) -> Table:
    """A site's images: an npz file or a folder of class folders, by the path that the site itself names."""
    path = Path(data.removeprefix("npz:").removeprefix("folder:")).expanduser()
    kind, own = ("folder:", facts) if path.is_dir() else ("npz:", FileFacts(facts.skip_bad))
    spec = DataSpec(f"{kind}{path}", image_size=image_size, skip_bad=own.skip_bad)
    return open_table(replace(spec, bits=own.bits or None, patient=own.patient or None))


def training_rows(table: Table) -> NDArray[np.int64]:
    """A site trains on all its images, unless its file or folders say that some are for testing."""
    return np.flatnonzero(np.isin(table.split, ["train", "draw"]))


def describe(
    table: Table, site: str, version: str, classes: Sequence[str], smallest_class: int = 1
) -> Description:
    """What a site tells of its data: shape, numbers of images by class, and sums over all its pixels.

    The number of a class with fewer than `smallest_class` images is None (`told_counts`).
    """
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
        label_counts=told_counts(counts, smallest_class),
        pixel_sums=tuple(moments.tolist()),
    )


def told_counts(counts: NDArray[np.int64], least: int) -> list[int | None]:
    """Numbers of images by class, None where they stay at the site.

    Of a class with fewer than `least` images no number is told. As the number of all images is told, the
    smallest other classes stay untold with it, until those untold are at least two with `least` images.

    >>> told_counts(np.array([199, 1]), 50), told_counts(np.array([90, 80, 3, 0]), 50)
    ([None, None], [90, None, None, 0])
    """
    order = [int(k) for k in np.argsort(counts, kind="stable") if counts[k]]
    untold = [k for k in order if counts[k] < least]
    for k in order[len(untold) :]:
        if untold and (len(untold) < 2 or counts[untold].sum() < least):
            untold.append(k)
    return [None if k in untold else int(count) for k, count in enumerate(counts)]


def relabel(table: Table, classes: Sequence[str]) -> NDArray[np.int64]:
    """Labels in the experiment's order of classes; a site need not have all of them, but no others."""
    other = [name for name in table.classes if name not in classes]
    if other:
        raise FedLDError(f"class '{other[0]}' is not one of the experiment's ({', '.join(classes)})")
    order = np.array([list(classes).index(name) for name in table.classes])
    labels: NDArray[np.int64] = order[table.labels]
    return labels


def site_federation(table: Table, site: str, order: Order, folder: Path) -> Federation:
    """The federation as a site sees it: itself and nobody else."""
    test = np.flatnonzero(table.split == "test")
    patients = table.columns.get("patient")
    _link(folder, table.folder / "images.npy", relabel(table, order.classes), patients)
    return Federation(
        name=site,
        folder=folder,
        classes=tuple(order.classes),
        clients=(Client(site, training_rows(table), test),),
        test=test,
        mean=tuple(order.mean),
        std=tuple(order.std),
    )


def server_federation(table: Table, sites: Sequence[Description]) -> Federation:
    """The federation as the server sees it: its own test images, and of every site the number of labels."""
    test = np.flatnonzero(table.split == "test") if (table.split == "test").any() else training_rows(table)
    clients = []
    for site in sites:
        own = test[table.columns["site"][test] == site.site] if "site" in table.columns else EMPTY
        told = tuple(count or 0 for count in site.label_counts)
        clients.append(Client(site.site, EMPTY, own, told, untold=site.train - sum(told)))
    sums = np.sum([site.pixel_sums for site in sites], axis=0)
    height, width, _ = sites[0].shape
    mean, std = mean_and_std(sums, sum(site.train for site in sites) * height * width)
    return Federation(
        "flower", table.folder, table.classes, tuple(clients), test, mean, std, partition="site"
    )


def _link(
    folder: Path, images: Path, labels: NDArray[np.int64], patients: NDArray[np.str_] | None = None
) -> None:
    """A folder that a Federation reads: the pixels of a table under other labels, and who is on them."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{os.getpid()}.npy"  # two processes may come here at once
    aside.symlink_to(images)
    aside.replace(folder / "images.npy")
    np.save(aside, labels)
    aside.replace(folder / "labels.npy")
    if patients is not None:
        np.save(aside, patients)
        aside.replace(folder / "column_0.npy")
        write_atomically(folder / "table.json", json.dumps({"columns": ["patient"]}).encode())
