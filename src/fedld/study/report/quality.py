"""Predictions of the final model against the truth: confusion, calibration, survival and values."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedld.errors import FedLDError
from fedld.records.reader import Run, by_label, longest_run
from fedld.study.measures import confusion_of
from fedld.study.report.chart import (
    INK,
    MUTED,
    SEQUENTIAL,
    SERIES,
    SURFACE,
    Chart,
    DataCell,
    Floats,
    Look,
    drawing,
    legend,
    new_figure,
    settle,
    short,
)
from fedld.study.report.clients import class_names

PANELS = 6


def confusion_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw counts over the test set, added up over seeds; one panel per method."""
    matrices: dict[str, Floats] = {}
    for label, method_runs in by_label(runs).items():
        counts = [m for run in method_runs if (m := confusion_of(run)) is not None]
        if counts and len({m.shape for m in counts}) == 1:
            matrices[label] = np.sum(counts, axis=0)
    if not matrices:
        return None
    classes = class_names(longest_run(runs), len(next(iter(matrices.values()))))
    panels = dict(list(matrices.items())[:PANELS])
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with drawing():
        figure = new_figure(560, 40 + (260 if columns > 1 else 400) * rows)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, (label, total) in zip(axes, panels.items(), strict=False):
            _cells(ax, total, classes)
            ax.set_title(short(label))
        for ax in axes[len(panels) :]:
            ax.set_visible(False)
        settle(figure)
    data: list[tuple[DataCell, ...]] = [
        (label, classes[i], classes[j] if j < len(classes) else "not finite", int(counts[i, j]))
        for label, counts in matrices.items()
        for i in range(counts.shape[0])
        for j in range(counts.shape[1])
    ]
    right = "; ".join(
        f"{k}: {100 * np.trace(m) / m.sum():.1f} % on the diagonal" for k, m in matrices.items()
    )
    return Chart(
        name="confusion",
        title="Confusion matrix",
        note="Row: true class. Column: predicted class. Shade: share of the row. All seeds together.",
        summary=f"Confusion on the test set. {right}.",
        figure=figure,
        columns=("method", "true", "predicted", "count"),
        rows=data,
    )


def _cells(ax: Any, counts: Floats, classes: list[str]) -> None:
    square = counts[:, : len(counts)] if not counts[:, len(counts) :].any() else counts
    share = square / np.maximum(square.sum(1, keepdims=True), 1)
    ax.pcolormesh(share, cmap=SEQUENTIAL, vmin=0, vmax=1, edgecolor=SURFACE, linewidth=1)
    for (i, j), value in np.ndenumerate(square):
        if len(classes) <= 6:
            text = ax.text(j + 0.5, i + 0.5, f"{int(value)}", ha="center", va="center", fontsize=10)
            text.set_gid("part-light" if share[i, j] > 0.5 else "part-ink")
            text.set_color(SURFACE if share[i, j] > 0.5 else INK)
    columns = [*classes, "not finite"][: square.shape[1]]
    rotation = 90 if max(map(len, columns)) > 8 or len(columns) > 5 else 0
    ax.set_xticks(
        np.arange(len(columns)) + 0.5, [short(c, 14) for c in columns], rotation=rotation, fontsize=9.5
    )
    ax.set_yticks(np.arange(len(classes)) + 0.5, [short(c, 14) for c in classes], fontsize=9.5)
    ax.set(xlabel="predicted", ylabel="true")
    ax.invert_yaxis()
    ax.grid(False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def calibration_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw a reliability diagram (Guo et al. 2017): accuracy against confidence, seeds pooled by count."""
    points_by_method = {label: _calibration(method_runs) for label, method_runs in by_label(runs).items()}
    points_by_method = {label: points for label, points in points_by_method.items() if points}
    if not points_by_method:
        return None
    with drawing():
        figure = new_figure(560, 420)
        ax = figure.add_subplot()
        ax.plot((0, 100), (0, 100), color=MUTED, linewidth=1, zorder=0)
        for label, points in points_by_method.items():
            x, y = ([100 * p[k] for p in points] for k in (0, 1))
            (line,) = ax.plot(x, y, **styles[label].plot | {"linewidth": 1})
            most = max(p[2] for p in points)
            dots = ax.scatter(
                x, y, [12 + 120 * p[2] / most for p in points], color=styles[label].colour, zorder=3
            )
            for part in (line, dots):
                part.set_gid(f"part-series-{styles[label].slot}")
        ax.set(xlabel="confidence (%)", ylabel="accuracy (%)", ylim=(0, 102))
        settle(figure)
    error = {
        k: sum(n * abs(a - c) for c, a, n in p) / sum(n for *_, n in p) for k, p in points_by_method.items()
    }
    return Chart(
        name="calibration",
        title="Calibration",
        note="On the grey line a confidence of 80 % is right in 80 of 100 cases; below it the model is too "
        "sure. "
        "Large dots hold many cases.",
        summary="Expected calibration error: " + ", ".join(f"{k} {100 * e:.1f} %" for k, e in error.items()),
        figure=figure,
        columns=("method", "confidence", "accuracy", "count"),
        rows=[(label, *point) for label, points in points_by_method.items() for point in points],
        legend=legend(points_by_method, styles),
    )


def _calibration(runs: Sequence[Run]) -> list[tuple[float, float, int]]:
    """Pool (confidence, accuracy, count) of every bin that holds a sample."""
    bins: dict[int, list[tuple[float, float, int]]] = {}
    for run in runs:
        made = run.predictions.get("calibration") if run.predictions else None
        if not isinstance(made, dict):
            continue
        columns = (made.get("confidence") or [], made.get("accuracy") or [], made.get("count") or [])
        for k, (confidence, accuracy, count) in enumerate(zip(*columns, strict=False)):
            if count and confidence is not None and accuracy is not None:
                bins.setdefault(k, []).append((confidence, accuracy, count))
    pooled = []
    for _, points in sorted(bins.items()):
        total = sum(n for *_, n in points)
        mean = tuple(sum(p[k] * p[2] for p in points) / total for k in (0, 1))
        pooled.append((mean[0], mean[1], total))
    return pooled


SURVIVAL_PANELS = 4
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
    """Draw Kaplan-Meier curves of the test set in thirds by risk: first seed, up to four methods."""
    columns_by_method = {
        label: columns
        for label, method_runs in by_label(runs).items()
        if (columns := _columns(method_runs, "time"))
    }
    panels = dict(list(columns_by_method.items())[:SURVIVAL_PANELS])
    if not panels:
        return None
    rows: list[tuple[DataCell, ...]] = []
    with drawing():
        figure = new_figure(560, 60 + 230 * -(-len(panels) // 2))
        grid = figure.subplots(-(-len(panels) // 2), min(2, len(panels)), squeeze=False).ravel()
        for axes, (label, columns) in zip(grid, panels.items(), strict=False):
            thirds = _thirds(columns["predicted"])
            for k, (name, colour) in enumerate(zip(THIRDS, COLOURS, strict=True)):
                x, y = kaplan_meier(columns["time"][thirds == k], columns["label"][thirds == k])
                end = columns["time"][thirds == k].max(initial=x[-1])
                axes.step([*x, end], [*y, y[-1]], where="post", color=colour, label=f"{name} risk")
                rows += [(label, name, float(a), float(b)) for a, b in zip(x, y, strict=True)]
            axes.set(title=short(label), xlabel="time", ylabel="share without event", ylim=(0, 1.02))
            axes.legend(frameon=False, fontsize=8)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        settle(figure)
    last = {(row[0], row[1]): row[3] for row in rows}
    summary = "; ".join(f"{label}, {third} risk: {share:.2f}" for (label, third), share in last.items())
    return Chart(
        name="kaplan-meier",
        title="Survival by predicted risk",
        note="Kaplan-Meier curves of the test set, in thirds by predicted risk, first seed. The further "
        "apart the "
        "curves are, the better the risks separate.",
        summary=f"Share without event at the last one. {summary}.",
        figure=figure,
        columns=("method", "risk", "time", "share without event"),
        rows=rows,
        wide=True,
    )


def values_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw mean observed against mean predicted value in ten bins of the predictions; all seeds together."""
    points_by_method = {label: _bins(method_runs) for label, method_runs in by_label(runs).items()}
    points_by_method = {label: points for label, points in points_by_method.items() if points}
    if not points_by_method:
        return None
    with drawing():
        figure = new_figure(560, 420)
        axes = figure.add_subplot()
        ends = [value for points in points_by_method.values() for point in points for value in point[:2]]
        axes.plot((min(ends), max(ends)), (min(ends), max(ends)), color=MUTED, linewidth=1, zorder=0)
        for label, points in points_by_method.items():
            predicted, observed = ([point[k] for point in points] for k in (0, 1))
            (line,) = axes.plot(predicted, observed, marker="o", **styles[label].plot | {"linewidth": 1})
            line.set_gid(f"part-series-{styles[label].slot}")
        axes.set(xlabel="predicted", ylabel="observed")
        settle(figure)
    gaps = {label: max(abs(p - o) for p, o, _ in points) for label, points in points_by_method.items()}
    return Chart(
        name="calibration-values",
        title="Calibration",
        note="Mean observed value against mean predicted value in ten bins of the predictions. On the grey "
        "line "
        "predictions are right on average; a flatter line means that they are too extreme.",
        summary="Largest gap of a bin: " + ", ".join(f"{label} {gap:.4g}" for label, gap in gaps.items()),
        figure=figure,
        columns=("method", "predicted", "observed", "count"),
        rows=[(label, *point) for label, points in points_by_method.items() for point in points],
        legend=legend(points_by_method, styles),
    )


def _bins(runs: Sequence[Run]) -> list[tuple[float, float, int]]:
    """Compute mean prediction, mean value and number of samples of every bin."""
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
    """Read numbers of the first run's predictions.csv; empty where it is missing or not finite."""
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
