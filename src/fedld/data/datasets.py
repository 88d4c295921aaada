"""`load`: from a DataSpec to a Federation, for every built-in dataset; `digits` itself is made here."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.data import folder, fundus, npz, sheet, sslfl
from fedld.data.client import Client
from fedld.data.federation import Federation
from fedld.data.partition import PARTITIONS
from fedld.data.pixels import Progress, resize
from fedld.data.spec import DataSpec
from fedld.data.splits import parted, repeated, stratified
from fedld.data.table import Table, cached, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.paths import cache_root
from fedld.registry import Registry, call_with, name_of, require_callable, wrong_part
from fedld.seeds import numpy_generator


def open_digits(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Copy the digits that scikit-learn ships into the cache."""

    def build(folder: Path) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]  # sixteen grey levels
        if spec.image_size is not None:
            images = resize(images, spec.image_size)
        split = np.full(len(images), "draw")
        write_table(folder, images, data.target.astype(np.int64), tuple("0123456789"), split=split)

    return cached(root, "digits", fingerprint("digits", spec.image_size), build)


OPENERS: dict[str, Callable[[DataSpec, Path, Progress | None], Table]] = {
    "fundus-sim": fundus.open_table,
    "digits": open_digits,
    "retina": sslfl.open_retina,
    "covid-fl": sslfl.open_covid,
    "npz:": npz.open_table,
    "folder:": folder.open_table,
    "csv:": sheet.open_table,
}
"""Built-in datasets: functions that open the table of a dataset."""


def _accept(value: Any) -> Federation | Callable[..., Federation]:
    if not isinstance(value, Federation) and not callable(value):
        raise wrong_part("dataset", "a Federation, or a function that makes one", value)
    return value  # type: ignore[no-any-return]


DATASETS: Registry[Callable[..., Federation]] = Registry(
    "dataset",
    {},
    accept=_accept,
    accept_entry=require_callable("dataset", "or a function that makes a Federation"),
    reserved=OPENERS,
)
"""Datasets beside the built-in ones: functions that make a Federation, given a spec's fields."""
DATASETS.load_plugins()


def check_names(spec: DataSpec) -> None:
    """Refuse a dataset or partition that is not there, before any file is read."""
    DATASETS.check(spec.dataset)
    if isinstance(spec.partition, str):
        PARTITIONS.check(spec.partition)


def load(
    spec: DataSpec, cache: Path | None = None, progress: Progress | None = None, *, whole: bool = False
) -> Federation:
    """Open a dataset and divide it among clients.

    Args:
        spec: the dataset and how it is divided.
        cache: where it is decoded to; default: the user's cache.
        progress: is called with the numbers of files that are decoded and of all.
        whole: all images are training images and none test images; `Federation.take_fold` then divides them.

    Returns:
        The federation.

    Raises:
        FedLDError: a file cannot be used, or the data cannot be divided as asked.
    """
    if spec.dataset in DATASETS:
        federation: Federation = call_with(DATASETS[spec.dataset], "dataset", **vars(spec))
    else:
        federation = federate(open_table(spec, cache, progress), spec, whole=whole)
    return replace(federation, spec=spec)


def open_table(spec: DataSpec, cache: Path | None = None, progress: Progress | None = None) -> Table:
    """Open (or first decode) a dataset; `progress(done, total)` is called while files are decoded."""
    DATASETS.check(spec.dataset)
    head, colon, _ = spec.dataset.partition(":")
    return OPENERS[head + colon](spec, cache_root(cache), progress)


def federate(table: Table, spec: DataSpec, *, whole: bool = False) -> Federation:
    """Divide a table's training rows among clients; test rows of a client's site are its own test set too."""
    if spec.task != table.task:
        raise FedLDError(f"task '{spec.task}' does not fit '{spec.dataset}', which is for {table.task}")
    if len(table.classes) < 2 and table.task == "classification":
        raise FedLDError(f"'{spec.dataset}' holds only one class, '{table.classes[0]}'")
    split = np.where(table.split == "", "", "train") if whole else _split(table, spec)
    name = _partition_name(table, spec)
    train, test = np.flatnonzero(split == "train"), np.flatnonzero(split == "test")
    if not len(train):
        raise FedLDError(f"'{spec.dataset}' has no training images")
    if not len(test) and not whole:
        raise FedLDError(f"'{spec.dataset}' has no test images")
    column = table.columns["site"] if table.fixed else _column(table, name)
    if column is None:
        clients = _drawn(table, spec, name, train)
    else:
        clients = _named(column, train, test, spec.dataset, name=name)
    _check_targets(table, spec.dataset)
    _check_events(table, clients)
    mean, std = table.statistics([client.train for client in clients])
    return Federation(
        name=spec.dataset,
        folder=table.folder,
        classes=table.classes,
        clients=clients,
        test=test,
        mean=mean,
        std=std,
        partition=name,
        skipped=table.skipped,
        notes=(
            *table.notes,
            *_unused(spec, column, len(clients)),
            *spec.notes(table.strata[train], name),
            *_lonely_categories(table, clients),
            *repeated(table.hashes(), clients, test),
            *parted(table, train, test),
            *_ignored_split(table, whole),
        ),
        pixels=table.pixels,
        task=table.task,
        groups=table.groups,
    )


def _check_targets(table: Table, dataset: str) -> None:
    """Refuse a label that no sample has, or every one that knows it; at a single site there may be such."""
    if table.task != "multilabel":
        return
    present, absent = ((table.labels == value).any(0) for value in (1, 0))
    for k in np.flatnonzero(~(present & absent)):
        raise FedLDError(
            f"{dataset}: label '{table.classes[k]}' is never {'absent' if present[k] else 'present'}"
        )


def _check_events(table: Table, clients: Sequence[Client]) -> None:
    """Refuse a client without events: its partial likelihood is 0, so it has nothing to learn from."""
    if table.task != "survival":
        return
    for client in clients:
        if not table.labels[client.train, 1].any():
            raise FedLDError(
                f"client '{client.name}' has no event among its {len(client.train)} training samples: "
                "survival needs one, so leave it out"
            )


def _lonely_categories(table: Table, clients: Sequence[Client]) -> Iterator[str]:
    """Name the categories that one client alone has."""
    categories = [k for k, name in enumerate(table.features) if " = " in name]
    if not categories or len(clients) < 2:
        return
    images = np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    present = np.stack([(images[client.train][:, categories] == 1).any(0) for client in clients])
    for place in np.flatnonzero(present.sum(0) == 1):
        owner = clients[int(present[:, place].argmax())].name
        yield f"only client '{owner}' has '{table.features[categories[place]]}'"


def _unused(spec: DataSpec, column: NDArray[np.str_] | None, clients: int) -> Iterator[str]:
    """Say so where a number of clients was asked for and the data names its own."""
    if column is not None and spec.clients not in (DataSpec().clients, clients):
        yield f"clients = {spec.clients} is not used: the data names its own {clients} clients"


def _ignored_split(table: Table, whole: bool) -> Iterator[str]:
    """Say so where all images are used although the dataset has a test set of its own."""
    if whole and "test" in table.split:
        yield "the dataset's own split is not used: its training and test images are divided into folds"


def _split(table: Table, spec: DataSpec) -> NDArray[np.str_]:
    """Complete the dataset's own split: other rows are drawn once for all runs, whole patients together."""
    split = table.split.astype("<U5")  # room for 'train', whatever the width on disk
    open_rows = np.flatnonzero(split == "draw")
    patients = table.columns["patient"][open_rows] if "patient" in table.columns else None
    rng = numpy_generator(spec.test_seed, "test-split")
    taken = stratified(table.strata[open_rows], spec.test_fraction, rng, patients)
    split[open_rows] = np.where(taken, "test", "train")
    return split


def _partition_name(table: Table, spec: DataSpec) -> str:
    if callable(spec.partition):
        return name_of(spec.partition)
    if spec.split is not None:
        return f"column:sslfl_split{spec.split}"
    return table.partition if spec.partition == "auto" else spec.partition


def _column(table: Table, name: str) -> NDArray[np.str_] | None:
    """Find the text column that names the clients; None where the partition is drawn."""
    if name != "site" and not name.startswith("column:"):
        return None
    column = name.removeprefix("column:")
    if column not in table.columns:
        has = ", ".join(sorted(table.columns)) or "none"
        raise FedLDError(f"The dataset has no text column '{column}' to divide by; it has: {has}")
    return table.columns[column]


def _named(
    column: NDArray[np.str_], train: NDArray[np.int64], test: NDArray[np.int64], dataset: str, name: str
) -> tuple[Client, ...]:
    trains, tests = _by_name(column, train), _by_name(column, test)
    names = sorted(trains.keys() - {""}, key=natural)
    if not names:
        raise FedLDError(f"Partition '{name}' names no client of '{dataset}'")
    empty = np.empty(0, np.int64)
    return tuple(Client(name=site, train=trains[site], test=tests.get(site, empty)) for site in names)


def _by_name(column: NDArray[np.str_], rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Group rows by a column in one pass: there may be thousands of names."""
    order = np.argsort(column[rows], kind="stable")
    names, starts = np.unique(column[rows][order], return_index=True)
    return dict(zip(map(str, names), np.split(rows[order], starts[1:]), strict=False))


def _drawn(table: Table, spec: DataSpec, name: str, train: NDArray[np.int64]) -> tuple[Client, ...]:
    parts = spec.divide(table.strata[train], name)
    empty = np.empty(0, np.int64)
    return tuple(
        Client(name=f"client_{i}", train=train[part], test=empty) for i, part in enumerate(parts, start=1)
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts client_2 before client_10: the order of clients everywhere."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
