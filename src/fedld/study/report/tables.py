"""Tables of the report: comparison, costs, settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedld.records.reader import Run, by_label, clean, longest_run
from fedld.records.schema import RoundColumn
from fedld.records.tables import flatten
from fedld.study.comparison import Comparison, Standing
from fedld.study.formats import spread
from fedld.study.report.chart import Look
from fedld.study.report.clients import fairness
from fedld.study.sites import measured_at_sites
from fedld.study.verdict import signed


@dataclass(frozen=True)
class TableCell:
    """A cell: what is shown and what it is sorted by."""

    text: str
    sort: float | str | None = None
    colour: str = ""  # of a method, in CSS
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Rows under a head; the first column names the row."""

    name: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[TableCell]]
    wide: bool = True


def comparison_table(comparison: Comparison, styles: Mapping[str, Look]) -> PageTable:
    """Tabulate every method: the primary measure with its paired difference, then all other measures."""
    fair, primary = fairness(comparison.runs), comparison.primary_measure
    unranked = [s for s in comparison.standings if s not in comparison.ranked]
    others = [name for name in comparison.measures if name != comparison.primary]
    rows = []
    for s in [*comparison.ranked, *unranked]:
        d = s.difference
        rows.append(
            [
                TableCell(s.label, s.label, styles[s.label].css),
                _measured(comparison, s, comparison.primary),
                TableCell(signed(d.mean, primary.digits), d.mean) if d else TableCell("–"),
                _interval(d.interval if d else None, primary.digits),
                p_value(s.p_value, good=d is not None and d.mean * primary.sign > 0),
                plain([d.effect_size] if d and d.effect_size is not None else [], 1),
                *(_measured(comparison, s, name) for name in others),
                mean_cell([fair[s.label]["gap"]] if s.label in fair else [], primary.digits),
                mean_cell(list(s.personal.values()), primary.digits),
                TableCell(", ".join(s.never) or "–", tone="bad" if s.never else ""),
                TableCell(str(len(s.seeds)), len(s.seeds)),
            ]
        )
    heads = {name: f"{measure.title} {measure.unit}".strip() for name, measure in comparison.measures.items()}
    columns = ["method", heads[comparison.primary], f"minus {comparison.baseline}", "95 % interval"]
    columns += ["p (Holm)", "effect", *(heads[name] for name in others), "client gap"]
    columns += [f"personalised {primary.unit}".strip()]
    columns += ["never predicted", f"{comparison.unit}s"]
    note = (
        f"Mean ± standard deviation over {comparison.unit}s, global model, last round. The interval is each "
        "comparison's own; p is corrected for all of them; effect: mean difference in its standard "
        "deviations (Hedges). Select a heading to sort."
    )
    note = f"{comparison.method_note} {note}".strip()
    return _drop_empty(PageTable(name="comparison", title="Methods", note=note, columns=columns, rows=rows))


def _measured(comparison: Comparison, standing: Standing, measure: str) -> TableCell:
    values, digits = list(standing.values.get(measure, {}).values()), comparison.measures[measure].digits
    return TableCell(spread(values, digits), fmean(values)) if values else TableCell("–")


def _interval(interval: tuple[float, float] | None, digits: int) -> TableCell:
    if interval is None:
        return TableCell("–")
    return TableCell(f"[{signed(interval[0], digits)}, {signed(interval[1], digits)}]", interval[0])


def _drop_empty(table: PageTable) -> PageTable:
    keep = [k for k in range(len(table.columns)) if any(row[k].text != "–" for row in table.rows)]
    rows = [[row[k] for k in keep] for row in table.rows]
    return PageTable(
        name=table.name,
        title=table.title,
        note=table.note,
        columns=[table.columns[k] for k in keep],
        rows=rows,
    )


def mean_cell(values: Sequence[float], digits: int) -> TableCell:
    """Format mean ± spread with some digits."""
    if not values:
        return TableCell("–")
    return TableCell(spread(values, digits), fmean(values))


def plain(values: Sequence[float], digits: int) -> TableCell:
    """Format a mean with some digits."""
    return TableCell(f"{fmean(values):.{digits}f}", fmean(values)) if values else TableCell("–")


def p_value(p: float | None, *, good: bool) -> TableCell:
    """Format a p value; below 5 % in the tone of its difference, for better or worse."""
    if p is None:
        return TableCell("–")
    tone = ("good" if good else "bad") if p < 0.05 else ""
    return TableCell("< 0.001" if p < 0.001 else f"{p:.3f}", p, tone=tone)


def cost_table(runs: Sequence[Run]) -> PageTable:
    """Tabulate traffic and time of every method, mean over seeds."""
    rows = []
    for label, method_runs in by_label(runs).items():
        up, down, seconds = (
            _sums(method_runs, "bytes_up"),
            _sums(method_runs, "bytes_down"),
            _sums(method_runs, "seconds"),
        )
        rounds = fmean(len(run.rounds.lines) for run in method_runs)
        if not rounds:
            continue
        rows.append(
            [
                TableCell(label, label),
                plain([v / 1e6 for v in up], 1),
                plain([v / 1e6 for v in down], 1),
                plain(seconds, 1),
                plain([s / rounds for s in seconds], 2),
                TableCell(f"{rounds:.0f}", rounds),
            ]
        )
    columns = ["method", "MB up", "MB down", "seconds", "s per round", "rounds"]
    return PageTable(
        name="cost", title="Cost of a run", note="Mean over seeds.", columns=columns, rows=rows, wide=False
    )


def target_table(comparison: Comparison) -> PageTable | None:
    """Tabulate rounds, traffic and time until each method stays at the target accuracy; None without one."""
    if comparison.level is None:
        return None
    rows = []
    for s in [s for s in comparison.standings if s.values]:
        if s.reached is None:
            rows.append([TableCell(s.label, s.label), TableCell("not reached"), *([TableCell("–")] * 3)])
            continue
        numbers = [s.reached.megabytes_up, s.reached.megabytes_down, s.reached.seconds]
        first = TableCell(str(s.reached.round), s.reached.round)
        rows.append([TableCell(s.label, s.label), first, *(plain([value], 1) for value in numbers)])
    note = (
        f"First evaluated round from which on the mean accuracy over seeds is {comparison.level:.2f} % or "
        "more, and the cost until then (compare --target)."
    )
    columns = ["method", "rounds", "MB up", "MB down", "seconds"]
    title = f"Cost to {comparison.level:.1f} % accuracy"
    return PageTable(name="target", title=title, note=note, columns=columns, rows=rows, wide=False)


def _sums(runs: Sequence[Run], key: RoundColumn) -> list[float]:
    return [float(np.nansum(list(run.series(key).values()))) for run in runs]


def sites_table(runs: Sequence[Run]) -> PageTable | None:
    """Tabulate the final models on every site's own test pictures, one run per method; None without any."""
    rows = []
    for label, method_runs in by_label(runs).items():
        run = longest_run(method_runs)
        for name, models in measured_at_sites(run.summary).items() if run.summary else ():
            for which, result in models.items():
                numbers = [TableCell(str(e), e.value) for e in result.estimates]
                count = TableCell(str(result.pictures), result.pictures)
                words = (label, str(run.seed), clean(name), which)
                rows.append([*(TableCell(word, word) for word in words), count, *numbers])
    if not rows:
        return None
    at = "/".join(dict.fromkeys(f"{float(run.config.get('specificity', 0.9)):g}" for run in runs))
    columns = ["method", "seed", "site", "model", "pictures", "accuracy", "AUROC", f"sensitivity at {at}"]
    note = (
        "Measured where the pictures are, after the last round, with 95 % intervals: Wilson's, DeLong's, a "
        "bootstrap. Sensitivity is for the last class, at the specificity that the heading names."
    )
    return PageTable(
        name="sites", title="Every site's own test pictures", note=note, columns=columns, rows=rows
    )


def settings_table(runs: Sequence[Run]) -> PageTable:
    """Tabulate the settings of every method; those that are equal for all appear once."""
    grouped = by_label(runs)
    flat = {label: flatten(longest_run(method_runs).config) for label, method_runs in grouped.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings if key not in ("seed", "fold"))
    rows = []
    for key in keys:
        values = {label: settings.get(key, "–") for label, settings in flat.items()}
        equal = len(set(values.values())) == 1
        text = next(iter(values.values())) if equal else "; ".join(f"{k}: {v}" for k, v in values.items())
        rows.append([TableCell(key, key), TableCell(text, text), TableCell("all" if equal else "differs")])
    seeds = sorted({run.seed for run in runs})
    rows.append([TableCell("seed", "seed"), TableCell(", ".join(map(str, seeds))), TableCell("")])
    return PageTable(
        name="settings",
        title="Settings",
        note="As saved beside the results.",
        columns=["setting", "value", "methods"],
        rows=rows,
        wide=False,
    )


def environment_table(runs: Sequence[Run]) -> PageTable:
    """Tabulate software and machine of the finished runs, as far as they were recorded."""
    values_by_name: dict[str, dict[str, None]] = {}
    for run in runs:
        environment: dict[str, object] = {}
        if run.summary is not None:
            environment = {"fedld": run.summary.get("version"), "parameters": run.summary.get("parameters")}
        environment |= run.environment or {}
        for key, value in environment.items():
            if value is not None:
                values_by_name.setdefault(key, {})[clean(value)] = None
    rows = [[TableCell(key, key), TableCell("; ".join(values))] for key, values in values_by_name.items()]
    return PageTable(
        name="environment",
        title="Environment",
        note="Where the runs were made.",
        columns=["fact", "value"],
        rows=rows,
        wide=False,
    )
