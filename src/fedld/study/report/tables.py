"""Tables of the report: comparison, the paper's numbers, costs, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fedld.study.paper import PAPER as REPORTED
from fedld.study.report.chart import Look
from fedld.study.report.clients import fairness
from fedld.study.report.curves import by_label
from fedld.study.report.words import signed
from fedld.study.runs import Run, clean, fullest, number
from fedld.study.verdict import Verdict

# Table 1 of the paper: final test accuracy (%), ImageNet-pretrained ResNet-50, 200 rounds.
PAPER_COLUMNS = ("Retina split 1", "Retina split 2", "Retina split 3", "COVID-FL")
PAPER = {label: tuple(row.values()) for label, row in REPORTED["table1"].items()}


@dataclass(frozen=True)
class Entry:
    """A cell: what is shown and what it is sorted by."""

    text: str
    sort: float | str | None = None
    colour: str = ""  # of a method, in CSS
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head; the first column names the row."""

    name: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[Entry]]
    wide: bool = True


def comparison_table(runs: Sequence[Run], verdict: Verdict | None, styles: Mapping[str, Look]) -> Table:
    """Every method: accuracy, paired difference, the other measures of its last round, fairness."""
    fair, rows = fairness(runs), []
    standings = {s.label: s for s in verdict.standings} if verdict else {}
    order = [*standings, *(label for label in by_label(runs) if label not in standings)]
    for label in order:
        own, standing = by_label(runs)[label], standings.get(label)
        d = standing.difference if standing else None
        last = {key: _last(own, key) for key in ("auroc", "balanced_accuracy", "loss", "ece")}
        rows.append(
            [
                Entry(label, label, styles[label].css),
                percent(list(standing.accuracy.values()) if standing else []),
                Entry(signed(d.mean), d.mean) if d else Entry("–"),
                Entry(f"[{signed(d.interval[0])}, {signed(d.interval[1])}]", d.interval[0])
                if d and d.interval
                else Entry("–"),
                p_value(standing.p_value if standing else None),
                plain(last["auroc"], 4),
                percent([100 * v for v in last["balanced_accuracy"]]),
                plain(last["loss"], 4),
                plain(last["ece"], 3),
                percent([fair[label]["worst"]] if label in fair else []),
                percent([fair[label]["gap"]] if label in fair else []),
                percent([100 * v for v in _last(own, "personal_accuracy")]),
                Entry(str(len(own)), len(own)),
            ]
        )
    base = verdict.baseline if verdict else "baseline"
    columns = ["method", "accuracy %", f"minus {base}", "95 % interval", "p (Holm)", "AUROC", "balanced %"]
    columns += ["loss", "ECE", "worst client %", "client gap", "personalised %", "seeds"]
    note = (
        "Mean ± standard deviation over seeds, global model, last round. The interval is each comparison's "
        "own; p is corrected for all of them. Select a heading to sort."
    )
    return _drop_empty(Table("comparison", "Methods", note, columns, rows))


def _drop_empty(table: Table) -> Table:
    keep = [k for k in range(len(table.columns)) if any(row[k].text != "–" for row in table.rows)]
    rows = [[row[k] for k in keep] for row in table.rows]
    return Table(table.name, table.title, table.note, [table.columns[k] for k in keep], rows)


def _last(runs: Sequence[Run], key: str) -> list[float]:
    """The last finite value of every run that has one."""
    found = []
    for run in runs:
        values = [v for line in run.rounds.lines if np.isfinite(v := number(line, key))]
        found += values[-1:]
    return found


def percent(values: Sequence[float]) -> Entry:
    """Mean ± spread with two digits."""
    if not values:
        return Entry("–")
    text = f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")
    return Entry(text, fmean(values))


def plain(values: Sequence[float], digits: int) -> Entry:
    """Mean with some digits."""
    return Entry(f"{fmean(values):.{digits}f}", fmean(values)) if values else Entry("–")


def p_value(p: float | None) -> Entry:
    """Small p values are not worth their digits."""
    if p is None:
        return Entry("–")
    return Entry("< 0.001" if p < 0.001 else f"{p:.3f}", p, tone="good" if p < 0.05 else "")


def paper_table(runs: Sequence[Run]) -> Table:
    """The paper's numbers for the methods compared here."""
    names = {_method(run): run.label for run in runs}
    rows = [
        [Entry(names[m], names[m]), *(Entry(f"{v:.2f}", v) for v in PAPER[m])] for m in PAPER if m in names
    ]
    note = (
        "Final accuracy (%) as published: Retina and COVID-FL, pretrained ResNet-50, 200 rounds, one seed. "
        "Other data and another model than here: compare order and distance, not level."
    )
    if runs[0].config.get("dataset") in ("retina", "covid-fl"):
        note = "Final accuracy (%) as published: pretrained ResNet-50, 200 rounds, one seed, no interval."
    return Table("paper", "The paper's numbers (Table 1)", note, ["method", *PAPER_COLUMNS], rows)


def _method(run: Run) -> str:
    method = run.config.get("method")
    return str(method.get("name") if isinstance(method, dict) else method)


def cost_table(runs: Sequence[Run]) -> Table:
    """Traffic and time of every method, mean over seeds."""
    rows = []
    for label, own in by_label(runs).items():
        up, down, seconds = (_sums(own, key) for key in ("bytes_up", "bytes_down", "seconds"))
        rounds = fmean(len(run.rounds.lines) for run in own)
        if not rounds:
            continue
        rows.append(
            [
                Entry(label, label),
                plain([v / 1e6 for v in up], 1),
                plain([v / 1e6 for v in down], 1),
                plain(seconds, 1),
                plain([s / rounds for s in seconds], 2),
                Entry(f"{rounds:.0f}", rounds),
            ]
        )
    columns = ["method", "MB up", "MB down", "seconds", "s a round", "rounds"]
    return Table("cost", "Cost of a run", "Mean over seeds.", columns, rows, wide=False)


def _sums(runs: Sequence[Run], key: str) -> list[float]:
    return [float(np.nansum([number(line, key) for line in run.rounds.lines])) for run in runs]


def settings_table(runs: Sequence[Run]) -> Table:
    """Settings of every method; those that are equal for all are shown once."""
    grouped = by_label(runs)
    flat = {label: flatten(fullest(own).config) for label, own in grouped.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings if key != "seed")
    rows = []
    for key in keys:
        values = {label: settings.get(key, "–") for label, settings in flat.items()}
        equal = len(set(values.values())) == 1
        shown = next(iter(values.values())) if equal else "; ".join(f"{k}: {v}" for k, v in values.items())
        rows.append([Entry(key, key), Entry(shown, shown), Entry("all" if equal else "differs")])
    seeds = sorted({run.seed for run in runs})
    rows.append([Entry("seed", "seed"), Entry(", ".join(map(str, seeds))), Entry("")])
    return Table(
        "settings",
        "Settings",
        "As saved beside the results.",
        ["setting", "value", "methods"],
        rows,
        wide=False,
    )


def environment_table(runs: Sequence[Run]) -> Table:
    """Software and machine of the finished runs, as far as they were recorded."""
    facts: dict[str, dict[str, None]] = {}
    for run in runs:
        summary = run.summary or {}
        own = {"fedld": summary.get("version"), "parameters": summary.get("parameters")}
        recorded = summary.get("environment")
        own |= flatten(recorded) if isinstance(recorded, dict) else {}
        for key, value in own.items():
            if value is not None:
                facts.setdefault(key, {})[clean(value)] = None
    rows = [[Entry(key, key), Entry("; ".join(values))] for key, values in facts.items()]
    return Table(
        "environment", "Environment", "Where the runs were made.", ["fact", "value"], rows, wide=False
    )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested tables as dotted keys.

    >>> flatten({"method": {"name": "fedprox", "mu": 0.1}, "lr": 0.05})
    {'method.name': 'fedprox', 'method.mu': '0.1', 'lr': '0.05'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[clean(prefix + key)] = clean(value)
    return found
