"""Tables 1-3 of the paper beside the published numbers: arms x splits x seeds, one study per split."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from fedld.config.experiment import make_experiment
from fedld.config.presets import read_preset
from fedld.config.resolve import make_measures
from fedld.data import DataSpec
from fedld.data.datasets import open_table
from fedld.data.table import Table
from fedld.errors import FedLDError, unknown_name
from fedld.methods import METHODS
from fedld.records.reader import Run
from fedld.records.schema import Event
from fedld.records.tables import no_html
from fedld.records.writer import write_atomically
from fedld.study.compare import (
    StudyPlan,
    compare_cells,
    for_method,
    note_failed,
    open_study,
    short_name,
)
from fedld.study.comparison import Comparison
from fedld.study.formats import comma_separated, latex, markdown, spread
from fedld.study.grid import run_grid
from fedld.study.measures import check_primary
from fedld.study.report.tables import PageTable, TableCell

RETINA = ("retina-split1", "retina-split2", "retina-split3")

_COLUMNS = (*RETINA, "covid-fl")
_TABLE1 = {
    "fedavg": (83.63, 82.26, 81.13, 79.86),
    "fedprox": (84.17, 83.53, 81.20, 81.88),
    "fedbn": (83.91, 75.91, 65.25, 56.34),
    "fedpac": (78.01, 71.64, 52.81, 81.63),
    "fedgh": (83.90, 83.33, 81.56, 82.26),
    "fedld": (85.20, 83.83, 82.30, 83.87),
}
_TABLE2 = {
    "none": (83.63, 82.26, 81.13),
    "principal": (84.76, 82.67, 81.66),
    "margin": (84.63, 83.50, 81.96),
    "both": (85.20, 83.83, 82.30),
}
_TABLE3 = {
    "fedavg": 67.43,
    "fedprox": 69.87,
    "fedbn": 68.40,
    "fedpac": 66.59,
    "fedgh": 70.33,
    "fedld": 71.30,
}

PAPER: dict[str, dict[str, dict[str, float]]] = {
    "table1": {label: dict(zip(_COLUMNS, row, strict=True)) for label, row in _TABLE1.items()},
    "table2": {label: dict(zip(RETINA, row, strict=True)) for label, row in _TABLE2.items()},
    "table3": {label: {"retina-50-clients": value} for label, value in _TABLE3.items()},
}
"""table -> method -> preset -> percent."""

_TITLES = ("Retina split 1", "Retina split 2", "Retina split 3", "COVID-FL")


def paper_table(runs: Sequence[Run]) -> PageTable:
    """Make the report's table of the paper's numbers for the methods of some runs."""
    names = {run.method: run.label for run in runs}
    rows = [
        [TableCell(names[method], names[method]), *(TableCell(f"{value:.2f}", value) for value in values)]
        for method, values in _TABLE1.items()
        if method in names
    ]
    note = (
        "Final accuracy (%) as published: Retina and COVID-FL, pretrained ResNet-50, 200 rounds, one seed. "
        "Other data and another model than here: compare order and distance, not level."
    )
    if runs[0].config.get("dataset") in ("retina", "covid-fl"):
        note = "Final accuracy (%) as published: pretrained ResNet-50, 200 rounds, one seed, no interval."
    return PageTable(
        name="paper",
        title="The paper's numbers (Table 1)",
        note=note,
        columns=["method", *_TITLES],
        rows=rows,
    )


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


@dataclass(frozen=True, kw_only=True)
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
    """Plan the study of every split: preset, then the available data, then the given settings."""
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
        studies[split] = StudyPlan(
            name=f"{table}, {word}", command=command, baseline=baseline, cells=cells, primary=chosen_measure
        )
        words[split] = word
    dataset = next(iter(studies.values())).cells[0][1].dataset
    title = f"Table {table[-1]} at {scale} scale on {short_name(dataset)}"
    if not settings.get("data_root"):
        title += f", where {', '.join(words.values())} stand in for the paper's data"
    return TablePlan(table=table, title=title, command=command, studies=studies, splits=words)


def run_plan(
    plan: TablePlan, out: Path, *, resume: bool, jobs: int | None, progress: Callable[[Event], None]
) -> "Reproduced":
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
    """Merge settings, the later ones on top; the tables of single methods are merged key by key.

    >>> merge({"lr": 1, "fedld": {"objective": "x"}}, {"lr": 2, "fedld": {"lr": 3}})
    {'lr': 2, 'fedld': {'objective': 'x', 'lr': 3}}
    """
    tables = {key: {**settings[key], **more[key]} for key in more if key in METHODS and key in settings}
    return {**settings, **more, **tables}


def _chosen(table: str, splits: list[str] | None, settings: Settings) -> list[str]:
    """Choose the splits: those named, else those that the data can show."""
    names = [*SPLITS[table], *ALSO.get(table, ())]
    for split in splits or []:
        if split not in names:
            raise unknown_name(f"split of {table}", split, names)
    if splits or settings.get("data_root"):
        return splits or list(SPLITS[table])
    sites = "dataset" in settings and _open(settings).partition == "site"
    return [split for split in SPLITS[table] if split != "covid-fl" or sites]


def _data(split: str, scale: str, settings: Settings) -> Settings:
    """Give the settings of a split on the available data."""
    paper, small = read_preset(f"{split}-paper"), read_preset(f"{split}-small")
    real = REAL if scale == "small" else {}
    if settings.get("data_root"):
        published = {key: paper[key] for key in ("dataset", "split", *DRAWN) if key in paper}
        return {"partition": "auto", **published, **real}
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
    """Describe the clients of a column in words.

    >>> _word({"partition": "column:source"}), _word({"partition": "auto", "split": 3})
    ('source', 'published split 3')
    """
    if settings["partition"] == "dirichlet":
        return f"Dirichlet {settings['alpha']:g} of {settings['clients']} clients"
    if settings.get("split"):
        return f"published split {settings['split']}"
    return {"site": "sites"}.get(settings["partition"], str(settings["partition"]).removeprefix("column:"))


def _open(settings: Settings) -> Table:
    """Open the dataset's table, decoded once for all runs."""
    return open_table(
        DataSpec(dataset=settings["dataset"], image_size=settings.get("image_size", REAL["image_size"]))
    )


def _arm(table: str, arm: str, settings: Settings) -> Settings:
    """Give the settings of a row: a method, or (Table 2) FedAvg with single parts of FedLD switched on."""
    by_method = {name: settings[name] for name in settings if name in METHODS}
    shared = {"workers": 0} | {key: value for key, value in settings.items() if key not in METHODS}
    if table != "table2":
        METHODS.check(arm)
        return for_method(shared, arm, by_method.get(arm, {}))
    fedld = by_method.get("fedld", {})
    margin = {"objective": fedld.get("objective", "marg-log")}
    rule = {"rule": fedld.get("rule", "principal")}
    parts = {"none": {}, "principal": rule, "margin": margin, "both": margin | rule}
    if arm not in parts:
        raise unknown_name("row of table 2", arm, parts)
    return for_method(shared, "fedavg", by_method.get("fedavg", {})) | parts[arm]


matplotlib.use("Agg")

PERSONAL = ("fedbn", "fedpac")
NOTE = (
    "Final test accuracy of the global model in percent, mean ± standard deviation over seeds; differences "
    "are paired over seeds, with 95 % t intervals and p values corrected by Holm. The paper has one seed; "
    "its values for fedbn and fedpac (*) are those of the personalised models."
)


@dataclass(frozen=True)
class Column:
    """One split: its comparison, and what the paper reports for it."""

    split: str
    data: str
    comparison: Comparison
    paper: dict[str, float]

    def cell(self, label: str) -> str:
        """Format the paper's value."""
        if label not in self.paper:
            return "-"
        return f"{self.paper[label]:.2f}" + ("*" if label in PERSONAL else "")


@dataclass(frozen=True)
class Reproduced:
    """Table 1, 2 or 3, split by split."""

    table: str
    title: str
    command: str
    columns: list[Column]

    @property
    def labels(self) -> list[str]:
        """Rows, in order."""
        return [s.label for s in self.columns[0].comparison.standings]

    def write(self, out: Path) -> None:
        """Write table.json, table.md, table.tex, table.csv and differences.png/svg."""
        write_atomically(out / "table.json", json.dumps(self.to_json(), indent=1).encode())
        write_atomically(out / "table.md", self.to_markdown().encode())
        write_atomically(out / "table.tex", self.to_tex().encode())
        write_atomically(out / "table.csv", self.to_csv().encode())
        self.draw(out / "differences")

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        columns = [
            {"split": c.split, "data": c.data, "paper": c.paper} | c.comparison.to_json()
            for c in self.columns
        ]
        return {"table": self.table, "title": self.title, "command": self.command, "columns": columns}

    def to_markdown(self) -> str:
        """Write the overview as in the paper, then every split in full."""
        text = [f"# {self.title}", "", NOTE, "", markdown(self._overview())]
        for column in self.columns:
            head, *rows = column.comparison.table
            rows = [[*head, "paper"], *([*row, column.cell(row[0])] for row in rows)]
            sentences = [
                f"{column.comparison.verdict}.",
                *(f"- {line}" for line in column.comparison.warnings),
            ]
            text += ["", f"## {column.data}", "", *sentences, "", markdown(rows), column.comparison.why()]
        return no_html("\n".join(text) + f"\nMade by `{self.command}`.\n")

    def to_tex(self) -> str:
        """Write the overview as a tabular."""
        return latex(self._overview(), f"{self.title}\n{self.command}")

    def to_csv(self) -> str:
        """Write one row per split, method, seed and measure."""
        values = [[c.split, *row] for c in self.columns for row in c.comparison.values()]
        return comma_separated([["split", "method", "seed", "measure", "value"], *values])

    def _overview(self) -> list[list[str]]:
        head = [""] + [title for c in self.columns for title in (c.data, f"paper: {c.split}")]
        rows = [
            [label] + [text for c in self.columns for text in (_final(c.comparison, label), c.cell(label))]
            for label in self.labels
        ]
        return [head, *rows]

    def draw(self, path: Path) -> None:
        """Draw paired differences to the baseline with their 95 % intervals, as PNG and SVG."""
        with plt.rc_context({"svg.hashsalt": "fedld"}):
            count, width = len(self.labels), 3.2 * len(self.columns) + 1
            figure, axes = plt.subplots(
                1, len(self.columns), figsize=(width, 1.4 + 0.3 * count), sharey=True, squeeze=False,
                layout="constrained",
            )  # fmt: skip
            for ax, column in zip(axes[0], self.columns, strict=True):
                for y, standing in enumerate(column.comparison.standings):
                    if (d := standing.difference) is not None:
                        ax.plot(d.interval or (d.mean, d.mean), [y, y], color="#2f6db5", linewidth=2)
                        ax.plot(d.mean, y, "o", color="#2f6db5")
                ax.axvline(0, color="0.5", linewidth=0.8)
                measure = column.comparison.primary_measure
                unit = "points" if measure.unit == "%" else "units"
                over = f"{unit} of {measure.title} over {column.comparison.baseline}"
                ax.set(title=column.data, xlabel=over)
                ax.set_yticks(range(count), self.labels)
                ax.spines[["top", "right"]].set_visible(False)
            axes[0][0].invert_yaxis()
            figure.savefig(path.with_suffix(".png"), dpi=300)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            plt.close(figure)


def _final(comparison: Comparison, label: str) -> str:
    standing = comparison.standing(label)
    if (name := comparison.first.name) in standing.values:
        return spread(list(standing.values[name].values()))
    return f"{spread(list(standing.personal.values()))} (personalised)"
