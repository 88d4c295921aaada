"""`fedld.load(run)`: the records of a run or study as data frames, and as Parquet or CSV files.

Every frame starts with the columns run, label, method and seed, so frames of a study can be grouped.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedld.errors import FedLDError, unknown_name
from fedld.paths import user_path
from fedld.records.reader import Run, read
from fedld.records.tables import flat_client, flat_round, flat_summary, flatten, gram_clients

if TYPE_CHECKING:
    import polars as pl

FORMATS = ("csv", "parquet")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Tidy tables.

    runs        one row per run: settings and final results
    rounds      one row per round: accuracy, loss, terms, traffic, time
    clients     one row per round and client
    tests       one row per round, client and measure: the global model on the client's own test set
    labels      one row per client and class
    cross_loss  one row per round, model and data: L_j(w_i)
    cosines     one row per round and pair of clients: cosine of their updates
    """

    runs: "pl.DataFrame"
    rounds: "pl.DataFrame"
    clients: "pl.DataFrame"
    tests: "pl.DataFrame"
    labels: "pl.DataFrame"
    cross_loss: "pl.DataFrame"
    cosines: "pl.DataFrame"

    def write(self, folder: Path, format: str = "parquet") -> list[Path]:
        """Write one file per table; returns the paths."""
        if format not in FORMATS:
            raise unknown_name("format", format, FORMATS)
        written = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for field in fields(self):
                path, frame = folder / f"{field.name}.{format}", getattr(self, field.name)
                frame.write_parquet(path) if format == "parquet" else frame.write_csv(path)
                written.append(path)
        except OSError as error:
            raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None
        return written


def load(*paths: str | Path) -> Frames:
    """Read the records of runs and studies as polars data frames (extra `analysis`).

    Args:
        paths: run and study directories.

    Returns:
        Tables of runs, rounds, clients, tests, labels, cross losses and cosines.

    Raises:
        FedLDError: a path holds no records, or polars is not installed.

    >>> import fedld
    >>> result = fedld.run("fedavg", fedld.data("digits", clients=3), rounds=2, workers=0)
    >>> fedld.load(result.path).rounds["round"].to_list()
    [1, 2]
    """
    runs = read([user_path(path) for path in paths]).runs
    for run in runs:
        for problem in run.problems:
            warnings.warn(f"'{run.path}': {problem}", stacklevel=2)
    return Frames(
        runs=_frame(_run(run) for run in runs),
        rounds=_frame(_key(run) | flat_round(line) for run in runs for line in run.rounds.lines),
        clients=_frame(_key(run) | flat_client(line) for run in runs for line in run.clients.lines),
        tests=_frame(row for run in runs for row in _tests(run)),
        labels=_frame(row for run in runs for row in _labels(run)),
        cross_loss=_frame(row for run in runs for row in _cross(run)),
        cosines=_frame(row for run in runs for row in _cosines(run)),
    )


def data_frame(rows: Iterable[Row]) -> Any:
    """Make a data frame of rows, with columns of numbers where the rows have numbers.

    Args:
        rows: one mapping of names to values for every row; what a row lacks is missing in the frame.

    Returns:
        A pandas frame if pandas is installed, else a polars frame.

    Raises:
        FedLDError: neither library is installed.
    """
    if find_spec("pandas") is not None:
        return import_module("pandas").DataFrame(list(rows))
    return _frame(rows)


def _frame(rows: Iterable[Row]) -> "pl.DataFrame":
    try:
        import polars as pl
    except ImportError:
        raise FedLDError("data frames need polars: pip install 'fedld[analysis]'") from None
    return pl.DataFrame(list(rows), infer_schema_length=None, strict=False)


def _key(run: Run) -> Row:
    method = run.config.get("method")
    name = method.get("name") if isinstance(method, dict) else method
    key = {"run": run.path.name, "label": run.label, "method": name, "seed": run.seed}
    return key if run.fold is None else key | {"fold": run.fold}


def _run(run: Run) -> Row:
    settings = {f"setting.{key}": value for key, value in flatten(run.config).items()}
    results = flat_summary(run.summary) if run.summary else {}
    return _key(run) | {"finished": run.finished} | results | settings | _key(run)


def _tests(run: Run) -> Iterable[Row]:
    for line in run.rounds.lines:
        for client, scores in (line.get("client_tests") or {}).items():
            for name, value in scores.items():
                yield _key(run) | {"round": line["round"], "client": client, "measure": name, "value": value}


def _labels(run: Run) -> Iterable[Row]:
    seen = {line["index"]: line.get("label_counts") or [] for line in run.clients.lines}
    for index, counts in sorted(seen.items()):
        name = run.client_names[index]
        yield from (_key(run) | {"client": name, "class": k, "count": n} for k, n in enumerate(counts))


def _cross(run: Run) -> Iterable[Row]:
    for line in run.cross_loss.lines:
        names: Sequence[Any] = line["clients"]
        for j, row in enumerate(line["cross_loss"]):
            for i, loss in zip(line["sampled"], row, strict=True):
                yield _key(run) | {
                    "round": line["round"], "model": names[i], "data": names[j], "loss": loss
                }  # fmt: skip


def _cosines(run: Run) -> Iterable[Row]:
    for line in run.conflict.lines:
        names, gram = gram_clients(line)[0], line["gram"]
        for i, a in enumerate(names):
            for j, b in enumerate(names[:i]):
                scale = (gram[i][i] * gram[j][j]) ** 0.5
                yield _key(run) | {
                    "round": line["round"], "a": b, "b": a, "cosine": gram[i][j] / scale if scale else None
                }  # fmt: skip
