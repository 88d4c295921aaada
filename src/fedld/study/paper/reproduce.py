"""Tables 1-3 of the paper: arms x splits x seeds, each split a study of its own, all in one grid."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedld.config.experiment import make_experiment
from fedld.config.presets import read_preset
from fedld.config.resolve import make_measures
from fedld.data import DataSpec
from fedld.data.datasets import open_table
from fedld.data.table import Table
from fedld.errors import FedLDError, unknown_name
from fedld.methods import METHODS
from fedld.records.schema import Event
from fedld.study.compare import (
    StudyPlan,
    compare_cells,
    for_method,
    note_failed,
    open_study,
    short_name,
)
from fedld.study.grid import run_grid
from fedld.study.measures import check_primary
from fedld.study.paper.published import PAPER, RETINA, paper_table
from fedld.study.paper.reproduced import Column, Reproduced

Settings = dict[str, Any]

EXTRA = ("fedld-official", "consensus")
ARMS: dict[str, tuple[str, ...]] = {
    "table1": (*PAPER["table1"], *EXTRA),
    "table2": tuple(PAPER["table2"]),
    "table3": (*PAPER["table3"], *EXTRA),
}
SPLITS = {"table1": (*RETINA, "covid-fl"), "table2": RETINA, "table3": ("retina-50-clients",)}
ALSO = {"table2": ("covid-fl",)}  # not in the paper: for who asks
REAL = {"image_size": 48}  # at small scale: 24 pixels are for the simulated eyes
DRAWN = ("clients", "partition", "alpha")


@dataclass(frozen=True)
class TablePlan:
    """One study for every split that the data offer."""

    table: str
    title: str
    command: str
    studies: dict[str, StudyPlan]
    splits: dict[str, str]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(len(study.cells) for study in self.studies.values())

    @property
    def rounds(self) -> int:
        """Rounds of all runs together."""
        return sum(study.rounds for study in self.studies.values())


def plan(
    table: str,
    settings: Settings,
    seeds: list[int],
    *,
    scale: str = "small",
    arms: list[str] | None = None,
    splits: list[str] | None = None,
    command: str = "",
    primary: str | None = None,
) -> TablePlan:
    """The study of every split: preset, then the data at hand, then the given settings."""
    chosen = _chosen(table, splits, settings)
    studies, words = {}, {}
    for split in chosen:
        merged = merge(merge(read_preset(f"{split}-{scale}"), _data(split, scale, settings)), settings)
        word = split if settings.get("data_root") else _word(merged)
        cells = [
            (arm, make_experiment(_arm(table, arm, merged) | {"seed": seed}))
            for seed in seeds
            for arm in arms or ARMS[table]
        ]
        baseline = cells[0][0]
        chosen_measure = check_primary(primary, make_measures(cells[0][1]))
        studies[split] = StudyPlan(f"{table}, {word}", command, baseline, cells, chosen_measure)
        words[split] = word
    dataset = next(iter(studies.values())).cells[0][1].dataset
    title = f"Table {table[-1]} at {scale} scale on {short_name(dataset)}"
    if not settings.get("data_root"):
        title += f", where {', '.join(words.values())} stand in for the paper's data"
    return TablePlan(table, title, command, studies, words)


def run_plan(
    plan: TablePlan, out: Path, *, resume: bool, jobs: int | None, progress: Callable[[Event], None]
) -> Reproduced:
    """Run what is not finished, all splits in one grid; write the table and the report."""
    from fedld.study.report import write_report

    cells = {s: open_study(study, out / s, resume=resume) for s, study in plan.studies.items()}
    everything = [cell for part in cells.values() for cell in part]
    failed = run_grid(everything, jobs=jobs, progress=progress)
    columns = []
    for split, part in cells.items():
        paper = {arm: row[split] for arm, row in PAPER[plan.table].items() if split in row}
        note_failed(out / split, failed)
        comparison = compare_cells(plan.studies[split], part, failed)
        columns.append(Column(split, plan.splits[split], comparison, paper))
    result = Reproduced(plan.table, plan.title, plan.command, columns)
    result.write(out)
    write_report([out / split for split in plan.studies], out / "report.html", tables=[paper_table])
    return result


def merge(settings: Settings, more: Settings) -> Settings:
    """Settings with others on top; the tables of single methods are merged key by key.

    >>> merge({"lr": 1, "fedld": {"objective": "x"}}, {"lr": 2, "fedld": {"lr": 3}})
    {'lr': 2, 'fedld': {'objective': 'x', 'lr': 3}}
    """
    tables = {key: {**settings[key], **more[key]} for key in more if key in METHODS and key in settings}
    return {**settings, **more, **tables}


def _chosen(table: str, splits: list[str] | None, settings: Settings) -> list[str]:
    """The splits asked for; without a word, those that the data can show."""
    known = [*SPLITS[table], *ALSO.get(table, ())]
    for split in splits or []:
        if split not in known:
            raise unknown_name(f"split of {table}", split, known)
    if splits or settings.get("data_root"):
        return splits or list(SPLITS[table])
    sites = "dataset" in settings and _open(settings).partition == "site"
    return [split for split in SPLITS[table] if split != "covid-fl" or sites]


def _data(split: str, scale: str, settings: Settings) -> Settings:
    """What a split becomes on the data at hand."""
    paper, small = read_preset(f"{split}-paper"), read_preset(f"{split}-small")
    real = REAL if scale == "small" else {}
    if settings.get("data_root"):
        own = {key: paper[key] for key in ("dataset", "split", *DRAWN) if key in paper}
        return {"partition": "auto", **own, **real}
    if "dataset" not in settings and scale == "paper":
        raise FedLDError("paper scale needs the published images (--data-root) or a --dataset")
    drawn = {key: small[key] for key in DRAWN} | {"split": None}
    if settings.get("dataset", "fundus-sim") in ("fundus-sim", "digits"):
        return drawn
    if split == "covid-fl":
        return {"partition": "site", **real}
    if f"sslfl_split{split[-1]}" in _open(settings).columns:
        return {"split": int(split[-1]), "partition": "auto", **real}
    return drawn | real


def _word(settings: Settings) -> str:
    """The clients of a column in words.

    >>> _word({"partition": "column:source"}), _word({"partition": "auto", "split": 3})
    ('source', 'published split 3')
    """
    if settings["partition"] == "dirichlet":
        return f"Dirichlet {settings['alpha']:g} of {settings['clients']} clients"
    if settings.get("split"):
        return f"published split {settings['split']}"
    return {"site": "sites"}.get(settings["partition"], str(settings["partition"]).removeprefix("column:"))


def _open(settings: Settings) -> Table:
    """The dataset's table, decoded once for all runs."""
    return open_table(
        DataSpec(settings["dataset"], image_size=settings.get("image_size", REAL["image_size"]))
    )


def _arm(table: str, arm: str, settings: Settings) -> Settings:
    """Settings of one row: a method, or (Table 2) FedAvg with FedLD's parts switched on one by one."""
    own = {name: settings[name] for name in settings if name in METHODS}
    shared = {"workers": 0} | {key: value for key, value in settings.items() if key not in METHODS}
    if table != "table2":
        METHODS.check(arm)
        return for_method(shared, arm, own.get(arm, {}))
    fedld = own.get("fedld", {})
    margin = {"objective": fedld.get("objective", "marg-log")}
    rule = {"rule": fedld.get("rule", "principal")}
    parts = {"none": {}, "principal": rule, "margin": margin, "both": margin | rule}
    if arm not in parts:
        raise unknown_name("row of table 2", arm, parts)
    return for_method(shared, "fedavg", own.get("fedavg", {})) | parts[arm]
