"""Two views of one federation: a site sees its own images, the server its test set and all label counts.

Both are plain `Federation` values, so that workers, methods and records do not know that they are far apart;
at the server the clients' training images are `elsewhere`.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data import Client, DataSpec, Federation
from fedld.data.columns import (
    SheetColumn,
    aligned_rows,
    columns_of,
    lonely_levels,
    united_features,
    united_statistics,
)
from fedld.data.datasets import open_table
from fedld.data.table import Table, cached, fingerprint, mean_and_std, write_table
from fedld.engine.backends.flower.wire import Description, Order, TableColumn
from fedld.errors import FedLDError
from fedld.paths import cache_root
from fedld.records.writer import write_atomically
from fedld.tasks import TASKS, Task
from fedld.tasks.classification import UNKNOWN

EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What a site says of its files; no server can say it. An empty value says nothing.

    skip_bad       whether unreadable files are left out
    bits           that 16-bit pictures really use
    patient        pattern for the patient in a file's name
    task           that the data is for
    target_column  of a table; of survival TIME,EVENT
    split_column   of a table: train or test
    drop           columns of a table that are never used
    """

    skip_bad: bool = False
    bits: int = 0
    patient: str = ""
    task: str = "classification"
    target_column: str = ""
    split_column: str = ""
    drop: str = ""

    def told(self) -> dict[str, Any]:
        """As a node configuration."""
        return {key.replace("_", "-"): value for key, value in asdict(self).items()}

    @classmethod
    def from_node(cls, config: Mapping[str, Any]) -> "FileFacts":
        """From a site's own node configuration."""
        given = {name: config[key] for name in asdict(PLAIN) if (key := name.replace("_", "-")) in config}
        return cls(**{name: type(getattr(PLAIN, name))(value) for name, value in given.items()})


PLAIN = FileFacts()
TABLES = (".csv", ".parquet")


def open_site(data: str, image_size: int | None, facts: FileFacts = PLAIN) -> Table:
    """A site's data: an npz file, a folder or a table, by the path that the site itself names."""
    path = Path(data.removeprefix("npz:").removeprefix("folder:").removeprefix("csv:")).expanduser()
    spec = DataSpec(dataset=str(path), image_size=image_size, skip_bad=facts.skip_bad, task=facts.task)
    if path.is_dir():
        own = replace(spec, dataset=f"folder:{path}", bits=facts.bits or None, patient=facts.patient or None)
    elif path.suffix in TABLES:
        own = replace(
            spec,
            dataset=f"csv:{path}",
            target_column=facts.target_column or None,
            split_column=facts.split_column or None,
            drop=facts.drop,
        )
    else:
        own = replace(spec, dataset=f"npz:{path}")
    table = open_table(own)
    if table.task != facts.task:
        raise FedLDError(f"{path} is for {table.task}, not for {facts.task}")
    return table


def training_rows(table: Table) -> NDArray[np.int64]:
    """A site trains on all its images, unless its file or folders say that some are for testing."""
    return np.flatnonzero(np.isin(table.split, ["train", "draw"]))


def describe(
    table: Table,
    site: str,
    version: str,
    classes: Sequence[str],
    smallest_class: int = 1,
    server: Sequence[SheetColumn] = (),
    asked: Task | None = None,
) -> Description:
    """What a site tells of its data: numbers of samples by class, and sums over all pixels or columns.

    The number of a class with fewer than `smallest_class` samples is None (`told_counts`); so is that of a
    category, and its name is told only if it is one of the `server`'s table (`told_columns`). The task that
    is `asked` for says which sums over targets leave.
    """
    rows, task = training_rows(table), asked or TASKS[table.task]
    if not len(rows):
        raise FedLDError("there are no training images")
    labels = relabel(table, classes)[rows]
    _check_events(task, labels, smallest_class)
    names = task.strata_names(classes)
    images = np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    columns, moments = [], []
    if table.features:
        columns = told_columns(columns_of(table.features, images, rows), len(rows), smallest_class, server)
    else:
        moments = np.load(table.folder / "moments.npy", allow_pickle=False)[rows].sum(axis=0).tolist()
    return Description(
        site=site,
        version=version,
        shape=() if table.features else images.shape[1:],
        train=len(rows),
        test=int((table.split == "test").sum()),
        label_counts=told_counts(np.bincount(task.strata(labels), minlength=len(names)), smallest_class),
        pixel_sums=tuple(moments),
        columns=[TableColumn.of(column) for column in columns],
        target_sums=task.target_sums(labels),
    )


def _check_events(task: Task, labels: NDArray[Any], least: int) -> None:
    """Refuse a site without events, and one whose sums would tell of few."""
    if task.data != "survival":
        return
    events = int(labels[:, 1].sum())
    if not events:
        raise FedLDError(f"it has no event among its {len(labels)} training samples, and survival needs one")
    if task.target_sums(labels) and min(events, len(labels) - events or least) < least:
        raise FedLDError(f"{task.name} needs the number of its events, told from {least} on: take survival")


def told_columns(
    columns: Sequence[SheetColumn], rows: int, least: int, server: Sequence[SheetColumn] = ()
) -> list[SheetColumn]:
    """Columns as a site tells of them: nothing of fewer than `least` rows.

    Sums of fewer known numbers stay at the site. Where fewer cells are missing, their number does: sums are
    told as if these cells had the site's mean. A category of fewer rows keeps its number, and its name unless
    the server's table has it.

    >>> age = SheetColumn(name="age", kind="number", missing=True, sums=(8.0, 80.0, 808.0))
    >>> told_columns([age], 10, 5)[0].sums
    (10.0, 100.0, 1010.0)
    """
    known_levels = {column.name: set(column.levels) for column in server}
    told = []
    for column in columns:
        counts = {level: count or 0 for level, count in column.levels.items()}
        numbers = told_counts(np.array(list(counts.values()), np.int64), least)
        levels = {
            level: number
            for (level, count), number in zip(counts.items(), numbers, strict=True)
            if count >= least or level in known_levels.get(column.name, ())
        }
        sums = column.sums
        if sums is not None and sums[0] < least:
            sums = None
        elif sums is not None and 0 < rows - sums[0] < least:
            factor = rows / sums[0]
            sums = float(rows), factor * sums[1], factor * sums[2]
        told.append(replace(column, levels=levels, sums=sums))
    return told


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


def relabel(table: Table, classes: Sequence[str]) -> NDArray[Any]:
    """Targets in the experiment's order of classes or labels; a site may lack some, but has no others.

    A label that a site has not looked for is unknown there. Numbers and times stay as they are.
    """
    other = [name for name in table.classes if name not in classes]
    if other and table.task not in ("regression", "survival"):
        word = "label" if table.task == "multilabel" else "class"
        raise FedLDError(f"{word} '{other[0]}' is not one of the experiment's ({', '.join(classes)})")
    if table.task == "survival" or (table.task == "regression" and not other):
        return table.labels
    if other:
        raise FedLDError(f"its target is '{other[0]}', the experiment's '{classes[0]}'")
    order = np.array([list(classes).index(name) for name in table.classes])
    if table.task == "multilabel":
        labels = np.full((len(table.labels), len(classes)), UNKNOWN, table.labels.dtype)
        labels[:, order] = table.labels
        return labels
    return np.asarray(order[table.labels], table.labels.dtype)


def site_federation(table: Table, site: str, order: Order, folder: Path) -> Federation:
    """The federation as a site sees it: itself and nobody else."""
    test = np.flatnonzero(table.split == "test")
    file = table.folder / "images.npy"
    images: Path | NDArray[np.float32] = file
    if table.features:
        images = aligned_rows(table.features, np.load(file, allow_pickle=False), order.features)
    columns = {name: table.columns[name] for name in ("patient", "group") if name in table.columns}
    _link(folder, images, relabel(table, order.classes), columns, order.features)
    return Federation(
        name=site,
        folder=folder,
        classes=tuple(order.classes),
        clients=(Client(name=site, train=training_rows(table), test=test),),
        test=test,
        mean=tuple(order.mean),
        std=tuple(order.std),
        task=table.task,
        groups=table.groups,
    )


def server_federation(table: Table, sites: Sequence[Description]) -> Federation:
    """The federation as the server sees it: its own test images, and of every site the number of labels."""
    clients, test = _elsewhere(table, sites), _test_rows(table)
    if table.features:
        mean, std, features = _united(table, sites)
        view = _view(table, features)
    else:
        mean, std = _pixel_statistics(sites)
        view = table if table.task == "classification" else _view(table, ())
    return Federation(
        name="flower",
        folder=view.folder,
        classes=table.classes,
        clients=clients,
        test=test,
        mean=mean,
        std=std,
        partition="site",
        notes=tuple(lonely_levels({site.site: _columns(site) for site in sites})),
        task=table.task,
        groups=view.groups,
    )


def _test_rows(table: Table) -> NDArray[np.int64]:
    return np.flatnonzero(table.split == "test") if (table.split == "test").any() else training_rows(table)


def _columns(site: Description) -> list[SheetColumn]:
    return [column.column() for column in site.columns]


def _united(
    table: Table, sites: Sequence[Description]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[str, ...]]:
    """Mean, deviation and names of the features of all tables together, the server's among them."""
    places = {"the server": server_columns(table)} | {f"site '{site.site}'": _columns(site) for site in sites}
    features = united_features(places)
    rows = [site.train for site in sites]
    mean, std = united_statistics(features, [_columns(site) for site in sites], rows)
    return mean, std, features


def server_columns(table: Table) -> list[SheetColumn]:
    """Columns of the server's table, without numbers of rows; none where it has pictures."""
    if not table.features:
        return []
    images = np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    columns = columns_of(table.features, images, _test_rows(table))
    return [replace(column, levels=dict.fromkeys(column.levels), sums=None) for column in columns]


def _view(table: Table, features: Sequence[str]) -> Table:
    """The server's data under the features of all sites, and under the groups whose sizes sites tell."""
    task, images = TASKS[table.task], np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    facts: dict[str, Any] = {"task": table.task}
    columns = dict(table.columns)
    if table.features:
        facts["features"] = list(features)
    if table.task != "classification":
        facts["groups"] = task.strata_names(table.classes)
        columns["group"] = task.strata(table.labels).astype(np.str_)
    key = fingerprint("flower", table.folder.name, facts)

    def build(folder: Path) -> None:
        rows = aligned_rows(table.features, images, features) if table.features else np.array(images)
        split = table.split
        write_table(folder, rows, table.labels, table.classes, split=split, columns=columns, **facts)

    return cached(cache_root(), "flower", key, build)


def _elsewhere(table: Table, sites: Sequence[Description]) -> tuple[Client, ...]:
    """The sites as clients of which the server has no training images."""
    test, clients = _test_rows(table), []
    for site in sites:
        own = test[table.columns["site"][test] == site.site] if "site" in table.columns else EMPTY
        told = tuple(count or 0 for count in site.label_counts)
        untold = site.train - sum(told)
        clients.append(
            Client(
                name=site.site,
                train=EMPTY,
                test=own,
                elsewhere=told,
                untold=untold,
                target_sums=dict(site.target_sums),
            )
        )
    return tuple(clients)


def _pixel_statistics(sites: Sequence[Description]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    sums = np.sum([site.pixel_sums for site in sites], axis=0)
    assert sites[0].shape
    height, width, _ = sites[0].shape
    return mean_and_std(sums, sum(site.train for site in sites) * height * width)


def _link(
    folder: Path,
    images: Path | NDArray[np.float32],
    labels: NDArray[Any],
    columns: Mapping[str, NDArray[np.str_]],
    features: Sequence[str],
) -> None:
    """A folder that a Federation reads: pixels or rows of a table under other labels, and text columns."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{os.getpid()}.npy"  # two processes may come here at once
    if isinstance(images, Path):
        aside.symlink_to(images)
        aside.replace(folder / "images.npy")
    arrays: dict[str, NDArray[Any]] = {} if isinstance(images, Path) else {"images": images}
    arrays |= {f"column_{k}": column for k, column in enumerate(columns.values())}
    for name, array in {**arrays, "labels": labels}.items():
        np.save(aside, array)
        aside.replace(folder / f"{name}.npy")
    facts = {"columns": list(columns), "features": list(features)}
    write_atomically(folder / "table.json", json.dumps(facts).encode())
