"""`load`: from a DataSpec to a Federation."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.data import digits, folder, fundus, npz, sslfl
from fedld.data.federation import Client, Federation, stratified
from fedld.data.pixels import Progress
from fedld.data.spec import DataSpec
from fedld.data.table import Table, cache_root
from fedld.errors import FedLDError, nearest
from fedld.seeds import numpy_generator

DATASETS: dict[str, Callable[[DataSpec, Path, Progress | None], Table]] = {
    "fundus-sim": fundus.open_table,
    "digits": digits.open_table,
    "retina": sslfl.open_retina,
    "covid-fl": sslfl.open_covid,
    "npz:": npz.open_table,
    "folder:": folder.open_table,
}


def load(spec: DataSpec, cache: Path | None = None, progress: Progress | None = None) -> Federation:
    """Open a dataset and divide it among clients."""
    return federate(open_table(spec, cache, progress), spec)


def open_table(spec: DataSpec, cache: Path | None = None, progress: Progress | None = None) -> Table:
    """Open (or first decode) a dataset; `progress(done, total)` is called while files are decoded."""
    kind = spec.dataset.split(":")[0] + ":" * (":" in spec.dataset)
    if kind not in DATASETS:
        raise FedLDError(f"There is no dataset '{spec.dataset}': {nearest(kind, list(DATASETS))}.")
    return DATASETS[kind](spec, cache_root(cache), progress)


def federate(table: Table, spec: DataSpec) -> Federation:
    """Divide a table's training rows among clients; test rows of a client's site are its own test set too."""
    split = _split(table, spec)
    name = _partition_name(table, spec)
    train, test = np.flatnonzero(split == "train"), np.flatnonzero(split == "test")
    if not len(train):
        raise FedLDError(f"'{spec.dataset}' has no training images.")
    if not len(test):
        raise FedLDError(f"'{spec.dataset}' has no test images.")
    column = table.columns["site"] if table.fixed else _column(table, name)
    if column is None:
        clients = _drawn(table, spec, name, train)
    else:
        clients = _named(column, train, test, spec.dataset, name)
    mean, std = table.statistics(np.concatenate([client.train for client in clients]))
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
    )


def _split(table: Table, spec: DataSpec) -> NDArray[np.str_]:
    """The dataset's own split; rows without one are drawn with the seed, stratified by class."""
    split = table.split.astype("<U5")  # room for 'train', whatever the width on disk
    open_rows = np.flatnonzero(split == "draw")
    taken = stratified(table.labels[open_rows], spec.test_fraction, numpy_generator(spec.seed, "test-split"))
    split[open_rows] = np.where(taken, "test", "train")
    return split


def _partition_name(table: Table, spec: DataSpec) -> str:
    if spec.split is not None:
        return f"column:sslfl_split{spec.split}"
    return table.partition if spec.partition == "auto" else spec.partition


def _column(table: Table, name: str) -> NDArray[np.str_] | None:
    """The text column that names the clients, or None where the partition is drawn."""
    if name != "site" and not name.startswith("column:"):
        return None
    column = name.removeprefix("column:")
    if column not in table.columns:
        has = ", ".join(sorted(table.columns)) or "none"
        raise FedLDError(f"The dataset has no text column '{column}' to divide by; it has: {has}.")
    return table.columns[column]


def _named(
    column: NDArray[np.str_], train: NDArray[np.int64], test: NDArray[np.int64], dataset: str, name: str
) -> tuple[Client, ...]:
    names = sorted({str(value) for value in column[train]} - {""}, key=natural)
    if not names:
        raise FedLDError(f"Partition '{name}' names no client of '{dataset}'.")
    return tuple(Client(site, train[column[train] == site], test[column[test] == site]) for site in names)


def _drawn(table: Table, spec: DataSpec, name: str, train: NDArray[np.int64]) -> tuple[Client, ...]:
    parts = spec.divide(table.labels[train], name)
    empty = np.empty(0, np.int64)
    return tuple(Client(f"client_{i}", train[part], empty) for i, part in enumerate(parts, start=1))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts client_2 before client_10: the order of clients everywhere."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
