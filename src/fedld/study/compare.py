"""A study: methods x seeds on the same partitions and initial weights, and its table and report."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedld.engine.experiment import Experiment, make_experiment
from fedld.engine.records import Line, dump, write_atomically
from fedld.errors import FedLDError
from fedld.methods import METHODS
from fedld.registry import find
from fedld.study.causes import cause_of
from fedld.study.grid import Cell, run_grid
from fedld.study.table import Table, make_table


@dataclass(frozen=True)
class Study:
    """What to run: one experiment for every label and seed."""

    name: str
    command: str
    baseline: str
    cells: list[tuple[str, Experiment]]

    @property
    def rounds(self) -> int:
        """Rounds of all runs together."""
        return sum(experiment.rounds for _, experiment in self.cells)

    def to_json(self) -> dict[str, Any]:
        """Index of the study directory."""
        runs = [
            {"label": label, "method": e.method["name"], "seed": e.seed, "path": str(_path(label, e))}
            for label, e in self.cells
        ]
        return {"name": self.name, "command": self.command, "baseline": self.baseline, "runs": runs}


def plan(settings: dict[str, Any], methods: list[str], seeds: list[int], *, command: str) -> Study:
    """Every method with every seed; a table named like a method is for it alone: `fedprox.mu=0.1`."""
    if not methods or len(set(methods)) < len(methods):
        raise FedLDError(f"name at least one method, and each once, not '{','.join(methods)}'")
    for name in methods:
        find(METHODS, name, "method")
    own = {name: settings[name] for name in settings if name in METHODS}
    shared = {key: value for key, value in settings.items() if key not in METHODS}
    shared.setdefault("workers", 0)
    cells = [
        (name, make_experiment(for_method(shared, name, own.get(name, {})) | {"seed": seed}))
        for seed in seeds
        for name in methods
    ]
    baseline = "fedavg" if "fedavg" in methods else methods[0]
    return Study(f"{', '.join(methods)} on {cells[0][1].dataset}", command, baseline, cells)


def for_method(shared: dict[str, Any], name: str, own: dict[str, Any]) -> dict[str, Any]:
    """Shared settings with a method's own: keys of the experiment, or else options of the method."""
    experiment = {key: value for key, value in own.items() if key in Experiment.model_fields}
    options = {key: value for key, value in own.items() if key not in experiment}
    return {**shared, **experiment, "method": {"name": name, **options}}


def short_name(dataset: str) -> str:
    """A dataset's name in a title.

    >>> short_name("npz:/data/retina96.npz"), short_name("fundus-sim")
    ('retina96', 'fundus-sim')
    """
    return Path(dataset.partition(":")[2]).stem if ":" in dataset else dataset


def of_one_method(settings: dict[str, Any], method: str | None = None) -> dict[str, Any]:
    """Settings of a single run: the method's own table is merged, those of the others are left out.

    >>> of_one_method({"lr": 0.1, "method": "fedprox", "fedprox": {"mu": 0.2}, "fedld": {"lr": 0.3}})
    {'lr': 0.1, 'method': {'name': 'fedprox', 'mu': 0.2}}
    """
    shared = {key: value for key, value in settings.items() if key not in METHODS}
    if len(shared) == len(settings):
        return settings
    part = shared.get("method", "fedavg") if method is None else method
    table = {"name": part} if isinstance(part, str) else part
    merged = for_method(shared, table["name"], settings.get(table["name"], {}))
    return merged | {"method": {**merged["method"], **table}}


def run_study(
    study: Study, out: Path, *, resume: bool, jobs: int | None, progress: Callable[[Line], None]
) -> Table:
    """Run what is not finished, then write table.json, table.md and report.html."""
    from fedld.study.report import write_report

    cells = open_study(study, out, resume=resume)
    summaries = run_grid(cells, jobs=jobs, progress=progress)
    table = tabulate(study, cells, summaries)
    made = {"command": study.command}
    write_atomically(out / "table.json", json.dumps(table.to_json() | made, indent=1).encode())
    write_atomically(out / "table.md", f"{table.to_markdown()}\nMade by `{study.command}`.\n".encode())
    write_report([out], out / "report.html")
    return table


def tabulate(study: Study, cells: list[Cell], summaries: list[Line]) -> Table:
    """The table of finished cells, method by method."""
    grouped: dict[str, list[Line]] = {}
    paths: dict[str, list[Path]] = {}
    for cell, summary in zip(cells, summaries, strict=True):
        grouped.setdefault(cell.label, []).append(summary)
        paths.setdefault(cell.label, []).append(cell.path)
    table = make_table(study.name, grouped, study.baseline)
    return replace(table, causes=[cause_of(label, runs) for label, runs in paths.items()])


def open_study(study: Study, out: Path, *, resume: bool) -> list[Cell]:
    """Write the study's index, or find it there; gives every run its folder."""
    index = out / "study.json"
    if index.exists() and not resume:
        raise FedLDError(f"'{out}' already holds a study: choose another --out, or finish it with --resume")
    if (out / "config.toml").exists():
        raise FedLDError(f"'{out}' holds a run: choose another --out")
    if not index.exists():
        _make(out)
        write_atomically(index, dump(study.to_json()).encode())
    return [Cell(label, e, out / _path(label, e)) for label, e in study.cells]


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedLDError(f"cannot write to '{out}': {error.strerror}") from None


def _path(label: str, experiment: Experiment) -> Path:
    return Path("runs") / f"{label}-seed{experiment.seed}"
