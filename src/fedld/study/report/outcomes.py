"""Predicted against observed outcomes: Kaplan-Meier curves by predicted risk, values of a regression."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.records.reader import Run, by_label
from fedld.study.report.chart import Chart, DataCell, Floats, Look, legend, settle, short
from fedld.study.report.style import MUTED, SERIES, drawing, new_figure

PANELS = 4
BINS = 10
THIRDS = ("low", "middle", "high")
COLOURS = (SERIES[0], MUTED, SERIES[2])


def kaplan_meier(times: Floats, events: Floats) -> tuple[Floats, Floats]:
    """Estimate the share that survives each time of an event (Kaplan and Meier 1958).

    Args:
        times: (N,) of events or of the end of observation.
        events: (N,) 1 where there was an event, else 0.

    Returns:
        The times, 0 first, and the share that survives them.

    >>> kaplan_meier(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 0.0, 1.0, 0.0]))
    (array([0., 1., 3.]), array([1.   , 0.75 , 0.375]))
    """
    moments = np.unique(times[events > 0])
    at_risk = np.array([(times >= moment).sum() for moment in moments])
    deaths = np.array([((times == moment) & (events > 0)).sum() for moment in moments])
    survived = np.cumprod(1 - deaths / np.maximum(at_risk, 1)) if len(moments) else np.empty(0)
    return np.concatenate([[0.0], moments]), np.concatenate([[1.0], survived])


def survival_chart(runs: Sequence[Run]) -> Chart | None:
    """Kaplan-Meier curves of the test set in thirds by predicted risk: first seed, up to four methods."""
    found = {label: columns for label, own in by_label(runs).items() if (columns := _columns(own, "time"))}
    shown = dict(list(found.items())[:PANELS])
    if not shown:
        return None
    rows: list[tuple[DataCell, ...]] = []
    with drawing():
        figure = new_figure(560, 60 + 230 * -(-len(shown) // 2))
        grid = figure.subplots(-(-len(shown) // 2), min(2, len(shown)), squeeze=False).ravel()
        for axes, (label, columns) in zip(grid, shown.items(), strict=False):
            thirds = _thirds(columns["predicted"])
            for k, (name, colour) in enumerate(zip(THIRDS, COLOURS, strict=True)):
                x, y = kaplan_meier(columns["time"][thirds == k], columns["label"][thirds == k])
                end = columns["time"][thirds == k].max(initial=x[-1])
                axes.step([*x, end], [*y, y[-1]], where="post", color=colour, label=f"{name} risk")
                rows += [(label, name, float(a), float(b)) for a, b in zip(x, y, strict=True)]
            axes.set(title=short(label), xlabel="time", ylabel="share without event", ylim=(0, 1.02))
            axes.legend(frameon=False, fontsize=8)
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        settle(figure)
    last = {(row[0], row[1]): row[3] for row in rows}
    summary = "; ".join(f"{label}, {third} risk: {share:.2f}" for (label, third), share in last.items())
    return Chart(
        "kaplan-meier",
        "Survival by predicted risk",
        "Kaplan-Meier curves of the test set, in thirds by predicted risk, first seed. The further apart the "
        "curves are, the better the risks separate.",
        f"Share without event at the last one. {summary}.",
        figure,
        ("method", "risk", "time", "share without event"),
        rows,
        wide=True,
    )


def values_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Mean observed against mean predicted value in ten bins of the predictions; all seeds together."""
    found = {label: _bins(own) for label, own in by_label(runs).items()}
    found = {label: points for label, points in found.items() if points}
    if not found:
        return None
    with drawing():
        figure = new_figure(560, 420)
        axes = figure.add_subplot()
        ends = [value for points in found.values() for point in points for value in point[:2]]
        axes.plot((min(ends), max(ends)), (min(ends), max(ends)), color=MUTED, linewidth=1, zorder=0)
        for label, points in found.items():
            predicted, observed = ([point[k] for point in points] for k in (0, 1))
            (line,) = axes.plot(predicted, observed, marker="o", **styles[label].plot | {"linewidth": 1})
            line.set_gid(f"part-series-{styles[label].slot}")
        axes.set(xlabel="predicted", ylabel="observed")
        settle(figure)
    gaps = {label: max(abs(p - o) for p, o, _ in points) for label, points in found.items()}
    return Chart(
        "calibration-values",
        "Calibration",
        "Mean observed value against mean predicted value in ten bins of the predictions. On the grey line "
        "predictions are right on average; a flatter line means that they are too extreme.",
        "Largest gap of a bin: " + ", ".join(f"{label} {gap:.4g}" for label, gap in gaps.items()),
        figure,
        ("method", "predicted", "observed", "count"),
        [(label, *point) for label, points in found.items() for point in points],
        legend=legend(found, styles),
    )


def _bins(runs: Sequence[Run]) -> list[tuple[float, float, int]]:
    """Mean prediction, mean value and number of samples of every bin."""
    parts = [columns for run in runs if (columns := _columns([run], "label"))]
    if not parts:
        return []
    predicted, observed = (np.concatenate([part[key] for part in parts]) for key in ("predicted", "label"))
    order = np.argsort(predicted, kind="stable")
    bins = [part for part in np.array_split(order, min(BINS, len(order))) if len(part)]
    return [(float(predicted[b].mean()), float(observed[b].mean()), len(b)) for b in bins]


def _thirds(risks: Floats) -> NDArray[np.int64]:
    return np.searchsorted(np.quantile(risks, [1 / 3, 2 / 3]), risks, side="left")


def _columns(runs: Sequence[Run], needed: str) -> dict[str, Floats]:
    """Numbers of the first run's predictions.csv; none where it is missing or not finite."""
    file = Path(runs[0].path) / "predictions.csv"
    if not file.is_file():
        return {}
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        columns = {key: np.array([float(row[key]) for row in rows]) for key in {needed, "label", "predicted"}}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise FedLDError(f"predictions.csv cannot be read: {error}") from None
    return columns if rows and all(np.isfinite(column).all() for column in columns.values()) else {}
