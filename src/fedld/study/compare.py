"""A study: methods x seeds (x folds) on the same partitions and initial weights, and its table and report."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from fedld.config.experiment import Experiment, make_experiment, parse_toml
from fedld.config.own import name_values
from fedld.config.resolve import make_measures
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import THIS_MACHINE
from fedld.errors import FedLDError
from fedld.methods import METHODS
from fedld.paths import make_folder
from fedld.records.reader import check_format, read_object, read_run
from fedld.records.schema import FORMAT, REFUSED, Event, StudyEntry, StudyIndex
from fedld.records.tables import no_html
from fedld.records.writer import dump, write_atomically
from fedld.registry import options_of
from fedld.study.cluster import Cluster, end_session
from fedld.study.comparison import Comparison, compare_runs
from fedld.study.grid import Cell, run_grid
from fedld.study.measures import DEFAULT_TARGET, Target, check_primary


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """What to run: one experiment for every label and seed."""

    name: str
    command: str
    baseline: str
    cells: list[tuple[str, Experiment]]
    primary: str
    target: str = DEFAULT_TARGET

    @property
    def rounds(self) -> int:
        """Rounds of all runs together."""
        return sum(experiment.rounds for _, experiment in self.cells)

    def placed(self, out: Path) -> list[Cell]:
        """Give every run its folder in the study's folder."""
        return [Cell(label=label, experiment=e, path=out / _path(label, e)) for label, e in self.cells]

    def to_json(self) -> StudyIndex:
        """Give the index of the study directory."""
        runs: list[StudyEntry] = [
            {
                "label": label,
                "method": e.method["name"],
                "seed": e.seed,
                "path": str(_path(label, e)),
                "settings": e.to_toml(),
            }
            for label, e in self.cells
        ]
        return {
            "format": FORMAT,
            "name": self.name,
            "command": self.command,
            "baseline": self.baseline,
            "primary": self.primary,
            "target": self.target,
            "runs": runs,
        }


def plan(
    settings: dict[str, Any],
    methods: Sequence[Any] | Mapping[str, Any],
    seeds: Sequence[int],
    *,
    command: str,
    primary: str | None = None,
    target: str = DEFAULT_TARGET,
    values: Mapping[str, Any] | None = None,
) -> StudyPlan:
    """Plan every method with every seed and, with `folds`, every fold.

    A table named like a method is for it alone: `fedprox.mu=0.1`. One named like a label is for that row, so
    that a method can be compared with itself: `adamw.optimiser=adamw`.

    Methods are names, tables of a name and options, or values; a mapping says under which labels.
    `values` are the user's own values that settings have names for.
    """
    if isinstance(methods, str) or not isinstance(methods, Mapping | Sequence):
        raise FedLDError(f"methods is a list of methods, or a table of them by label, not {methods!r:.80}")
    labelled = methods if isinstance(methods, Mapping) else {_label(method): method for method in methods}
    for label in labelled:
        if not isinstance(label, str) or not label:
            raise FedLDError(f"a method's label in the table is a word, not {label!r:.80}")
    if not labelled or len(labelled) < len(methods):
        raise FedLDError(f"name at least one method, and each once, not '{','.join(map(_label, methods))}'")
    seeds = check_seeds(seeds)
    tables = {*METHODS, *labelled} - set(Experiment.model_fields)
    method_settings = {name: settings[name] for name in settings if name in tables}
    shared = {key: value for key, value in settings.items() if key not in tables}
    shared.setdefault("workers", 0)
    cells = [
        (label, make_experiment(_settings_of(label, method, shared, method_settings) | repetition, values))
        for repetition in _repetitions(seeds, shared)
        for label, method in labelled.items()
    ]
    baseline = "fedavg" if "fedavg" in labelled else next(iter(labelled))
    title = f"{', '.join(labelled)} on {cells[0][1].dataset}"
    decides = check_primary(primary, make_measures(cells[0][1]))
    Target.parse(target)
    return StudyPlan(
        name=title, command=command, baseline=baseline, cells=cells, primary=decides, target=target
    )


def _repetitions(seeds: Sequence[int], shared: Mapping[str, Any]) -> list[dict[str, int]]:
    """List the seeds, with every fold of a cross-validation, that each method is run with."""
    folds = shared.get("folds")
    if folds is None:
        return [{"seed": seed} for seed in seeds]
    if "fold" in shared:
        raise FedLDError("a study tests every fold: give folds, and no fold")
    if not isinstance(folds, int) or folds < 2:
        raise FedLDError(f"folds is a whole number from 2, not {folds!r:.80}")
    return [{"seed": seed, "fold": fold} for seed in seeds for fold in range(1, folds + 1)]


def check_seeds(seeds: Any) -> list[int]:
    """Check that seeds are different whole numbers, not negative."""
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise FedLDError(f"seeds is a list of whole numbers, not {seeds!r:.80}")
    values = list(seeds)
    whole = [int(seed) for seed in values if isinstance(seed, int | np.integer) and seed is not True]
    if not whole or len(set(whole)) < len(values) or min(whole) < 0:
        raise FedLDError(f"seeds must be whole numbers, different and not negative, not {values!r:.80}")
    return whole


def check_own_tables(typed: Collection[str], methods: Collection[Any]) -> None:
    """Refuse a setting that was typed for a method which is not in the study.

    Args:
        typed: names of the tables that the user gave by hand: `fedprox` of `fedprox.mu=0.1`.
        methods: names of the study's methods, or values.

    Raises:
        FedLDError: a table names a method of fedld that the study does not have.
    """
    present = [_label(method) for method in methods]
    for name in typed:
        if name in METHODS and name not in present:
            raise FedLDError(f"a setting is for '{name}', which is not in the study: {', '.join(present)}")


def _label(method: Any) -> str:
    """Name a method as the table does."""
    if isinstance(method, str):
        return method
    name: str = name_values({"method": method})[0]["method"]["name"]
    return name.rpartition(":")[2]


def _settings_of(
    label: str, method: Any, shared: dict[str, Any], by_method: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Merge the shared settings of a run with the tables of its method and its label."""
    if not isinstance(method, str):
        return {**shared, **by_method.get(label, {}), "method": method}
    METHODS.check(method)
    return for_method(shared, method, {**by_method.get(method, {}), **by_method.get(label, {})})


def for_method(shared: dict[str, Any], name: str, method_settings: dict[str, Any]) -> dict[str, Any]:
    """Merge shared settings with a method's own: options of the method, or else keys of the experiment."""
    names = options_of(METHODS[name]) if name in METHODS else {}
    in_experiment = {key for key in method_settings if key in Experiment.model_fields and key not in names}
    experiment = {key: method_settings[key] for key in method_settings if key in in_experiment}
    options = {key: method_settings[key] for key in method_settings if key not in in_experiment}
    return {**shared, **experiment, "method": {"name": name, **options}}


def short_name(dataset: str) -> str:
    """Shorten a dataset's name for a title.

    >>> short_name("npz:/data/retina96.npz"), short_name("fundus-sim")
    ('retina96', 'fundus-sim')
    """
    return Path(dataset.partition(":")[2]).stem if ":" in dataset else dataset


def of_one_method(settings: dict[str, Any], method: str | None = None) -> dict[str, Any]:
    """Give the settings of a single run: the method's own table is merged, other methods' are dropped.

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
    study: StudyPlan,
    out: Path,
    *,
    resume: bool,
    jobs: int | None,
    progress: Callable[[Event], None],
    engine: Engine = THIS_MACHINE,
    client: Any = None,
) -> Comparison:
    """Run the unfinished runs, then write the table (json, md, tex, csv) and report.html.

    With a Dask `client` the runs are on its cluster; all its machines see the folder `out`.
    """
    cells = [replace(cell, engine=engine) for cell in open_study(study, out, resume=resume)]
    end_session(out)
    # Plotting takes a second to import: do it while the runs are at work.
    Thread(target=import_module, args=("fedld.study.report",), daemon=True).start()
    cluster = Cluster(client, out) if client is not None else None
    failed = run_grid(cells, jobs=jobs, progress=progress, cluster=cluster)
    note_failed(out, failed)
    from fedld.study.report import write_report

    comparison = compare_cells(study, cells, failed)
    write_comparison(comparison, out, study.command)
    write_report([out], out / "report.html")
    return comparison


def reopen(out: Path) -> StudyPlan:
    """Read the plan of an existing study from its index."""
    index = read_object(out / "study.json")
    if index is None:
        raise FedLDError(f"'{out}' holds no study to finish")
    check_format(index, out / "study.json")
    try:
        cells = [(run["label"], make_experiment(parse_toml(run["settings"]))) for run in index["runs"]]
        name, command, baseline = (str(index[key]) for key in ("name", "command", "baseline"))
        target = str(index.get("target", DEFAULT_TARGET))
        Target.parse(target)
        decides = check_primary(index["primary"], make_measures(cells[0][1]))
        return StudyPlan(
            name=name, command=command, baseline=baseline, cells=cells, primary=decides, target=target
        )
    except (KeyError, TypeError):
        raise FedLDError(
            f"'{out / 'study.json'}' is damaged, or older than this: give the whole command and --resume"
        ) from None


def note_failed(out: Path, failed: Mapping[Path, str]) -> None:
    """Keep in the study's folder why runs failed, for the page; the runs' own folders stay as they are."""
    file = out / REFUSED
    reasons = {str(path.relative_to(out)): why for path, why in failed.items() if path.is_relative_to(out)}
    if reasons:
        write_atomically(file, dump(reasons).encode())
    else:
        file.unlink(missing_ok=True)


def compare_cells(study: StudyPlan, cells: list[Cell], failed: Mapping[Path, str]) -> Comparison:
    """Compare finished cells; those that failed are listed with the reason."""
    runs = [read_run(cell.path, cell.label, cell.experiment.seed, failed.get(cell.path)) for cell in cells]
    return compare_runs(study.name, runs, study.baseline, study.primary, target=study.target)


def write_comparison(comparison: Comparison, out: Path, command: str) -> None:
    """Write table.json, table.md, table.tex and table.csv."""
    made = {"command": command}
    write_atomically(out / "table.json", json.dumps(comparison.to_json() | made, indent=1).encode())
    text = f"{comparison.to_markdown()}\nMade by `{no_html(command)}`.\n"
    write_atomically(out / "table.md", text.encode())
    write_atomically(out / "table.tex", comparison.to_latex(command).encode())
    write_atomically(out / "table.csv", comparison.to_csv().encode())


def open_study(study: StudyPlan, out: Path, *, resume: bool) -> list[Cell]:
    """Write the study's index, or find it there; gives every run its folder.

    A study that goes on with more methods or seeds than it was begun with gets a new index.
    """
    index = out / "study.json"
    if index.exists() and not resume:
        raise FedLDError(f"'{out}' already holds a study: choose another --out, or finish it with --resume")
    if (out / "config.toml").exists():
        raise FedLDError(f"'{out}' holds a run: choose another --out")
    cells = study.placed(out)
    if not index.exists() or _goes_beyond(cells, out):
        make_folder(out)
        write_atomically(index, dump(study.to_json()).encode())
    return cells


def _goes_beyond(cells: Sequence[Cell], out: Path) -> bool:
    """Say whether the runs are those of the index in a folder, and more; a damaged one has none."""
    index = read_object(out / "study.json") or {}
    before = {out / str(run.get("path")) for run in index.get("runs") or []}
    return before < {cell.path for cell in cells}


def _path(label: str, experiment: Experiment) -> Path:
    folder = re.sub(r"[^\w.+-]+", "_", label)  # a label may be anything, a folder's name may not
    fold = "" if experiment.fold is None else f"-fold{experiment.fold}"
    return Path("runs") / f"{folder}-seed{experiment.seed}{fold}"
