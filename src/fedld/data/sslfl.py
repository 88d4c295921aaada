"""`retina` and `covid-fl`: the folders that the SSL-FL project publishes, exactly as they lie on disk.

labels.csv (name, label), train.csv, test.csv and one csv per client (one name per line), without headers; the
files in train/ and test/. Rows keep the order of labels.csv, from which the published splits were drawn.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedld.data.pixels import Listed, Progress, decode, stamps
from fedld.data.spec import DataSpec
from fedld.data.table import Table, Text, cached, file_sha256, fingerprint, write_table
from fedld.errors import FedLDError
from fedld.paths import require_regular, user_path

SIZE = 384  # pixels of the published training crops
Line = tuple[list[str], str]  # fields, and where they stand: 'train.csv line 7'


@dataclass(frozen=True, kw_only=True)
class Published:
    """Names, folders and statistics of one of the two datasets."""

    name: str
    classes: tuple[str, ...]
    clients: dict[str, str]  # text column -> folder of its client lists
    partition: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class LabelledFile:
    """One labelled file."""

    name: str
    label: int
    split: str
    listed: Listed


RETINA = Published(
    name="Retina",
    classes=("normal", "diseased"),
    clients={f"sslfl_split{k}": f"5_clients/split_{k}" for k in (1, 2, 3)},
    partition="column:sslfl_split1",
    mean=(0.5007, 0.5010, 0.5019),
    std=(0.0342, 0.0535, 0.0484),
)
COVID = Published(
    name="COVID-FL",
    classes=("normal", "pneumonia", "COVID-19"),
    clients={"site": "12_clients/split_real"},
    partition="site",
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


def open_retina(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Open the Retina folder."""
    return open_table(RETINA, spec, root, progress)


def open_covid(spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Open the COVID-FL folder."""
    return open_table(COVID, spec, root, progress)


def open_table(layout: Published, spec: DataSpec, root: Path, progress: Progress | None = None) -> Table:
    """Read the lists, decode the files once."""
    home = _home(layout, spec)
    rows = read_lists(home, len(layout.classes))
    items = [row.listed for row in rows]
    size = spec.image_size or SIZE

    def build(folder: Path) -> None:
        columns = {
            column: read_clients(home / place, rows)
            for column, place in layout.clients.items()
            if (home / place).is_dir()
        }
        done = decode(folder, items, size, skip_bad=spec.skip_bad, bits=spec.bits, progress=progress)
        write_table(
            folder,
            done.images,
            np.array([row.label for row in rows], np.int64),
            layout.classes,
            split=np.where(done.good, [row.split for row in rows], ""),
            columns=columns,
            mean=layout.mean,
            std=layout.std,
            partition=layout.partition,
            skipped=done.skipped,
        )

    lists = [(str(file), file_sha256(file)) for file in sorted(home.rglob("*.csv"))]
    key = fingerprint(layout.name, size, spec.skip_bad, spec.bits, lists, stamps(items))
    return cached(root, layout.name.lower(), key, build)


def read_lists(home: Path, classes: int) -> list[LabelledFile]:
    """Read the files of train.csv and test.csv with their labels, in the order of labels.csv."""
    listed: dict[str, tuple[str, str]] = {}
    for split in ("train", "test"):
        for fields, where in _lines(home / f"{split}.csv"):
            if fields[0] in listed:
                raise FedLDError(f"{where} names {fields[0]}, which {listed[fields[0]][1]} already names")
            listed[fields[0]] = split, where
    rows: list[LabelledFile] = []
    labels_by_file: dict[str, tuple[int, str]] = {}
    for fields, where in _lines(home / "labels.csv"):
        label = _label(fields, classes, where)
        first, place = labels_by_file.setdefault(fields[0], (label, where))
        if first != label:
            raise FedLDError(f"{where} gives {fields[0]} label {label}, {place} gives it {first}")
        if fields[0] in listed:
            split, place = listed.pop(fields[0])
            file = home / split / fields[0]
            rows.append(LabelledFile(fields[0], label, split, Listed(file, place)))
    if listed:
        name, (_, where) = next(iter(listed.items()))
        raise FedLDError(f"{where} names {name}, which has no label in {home / 'labels.csv'}")
    return rows


def read_clients(folder: Path, rows: list[LabelledFile]) -> Text:
    """Read the client of every row, '' for test files and files on no client's list."""
    position = {row.name: i for i, row in enumerate(rows) if row.split == "train"}
    clients = [""] * len(rows)
    for file in sorted(folder.glob("*.csv")):
        lines = list(_lines(file))
        if not lines:
            raise FedLDError(f"{file} lists no image, so client '{file.stem}' would be empty")
        for fields, where in lines:
            if fields[0] not in position:
                raise FedLDError(f"{where} names {fields[0]}, which is not in train.csv")
            if clients[position[fields[0]]]:
                raise FedLDError(f"{where} names {fields[0]}, which another client already has")
            clients[position[fields[0]]] = file.stem
    return np.array(clients)


def _home(layout: Published, spec: DataSpec) -> Path:
    """Find the dataset's folder: `data_root` itself, or a folder in it."""
    if spec.data_root is None:
        raise FedLDError(f"Dataset '{spec.dataset}' needs data_root, the folder that holds {layout.name}/")
    root = user_path(spec.data_root).resolve()
    home = next((home for home in (root / layout.name, root) if (home / "labels.csv").is_file()), None)
    if home is None:
        raise FedLDError(f"{root} does not hold {layout.name}/labels.csv")
    return home


def _lines(file: Path) -> Iterator[Line]:
    """Read non-empty lines with their place; field 0 is a plain file name."""
    try:
        require_regular(file)
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            for fields in reader:
                fields = [field.strip() for field in fields]
                if any(fields):
                    where = f"{file} line {reader.line_num}"
                    if Path(fields[0]).name != fields[0]:
                        raise FedLDError(f"{where} names '{fields[0]}', which is not a plain file name")
                    yield fields, where
    except FileNotFoundError as error:
        raise FedLDError(f"There is no file {file}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedLDError(f"{file} is not a readable csv file: {error}") from error


def _label(fields: list[str], classes: int, where: str) -> int:
    try:
        label = float(fields[1])
    except (IndexError, ValueError) as error:
        raise FedLDError(f"{where} has no label") from error
    if label not in range(classes):
        raise FedLDError(f"{where} has label {fields[1]}, which is not one of 0 to {classes - 1}")
    return int(label)
