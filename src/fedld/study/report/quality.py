"""What the final model gets wrong and how sure it is: confusion matrix and reliability diagram."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedld.records.reader import Run, by_label, longest_run
from fedld.study.measures import confusion_of
from fedld.study.report.chart import Chart, DataCell, Floats, Look, legend, settle, short
from fedld.study.report.clients import class_names
from fedld.study.report.style import INK, MUTED, SEQUENTIAL, SURFACE, drawing, new_figure

PANELS = 6


def confusion_chart(runs: Sequence[Run]) -> Chart | None:
    """Counts over the test set, added up over seeds; one panel per method."""
    found: dict[str, Floats] = {}
    for label, own in by_label(runs).items():
        counts = [m for run in own if (m := confusion_of(run)) is not None]
        if counts and len({m.shape for m in counts}) == 1:
            found[label] = np.sum(counts, axis=0)
    if not found:
        return None
    classes = class_names(longest_run(runs), len(next(iter(found.values()))))
    shown = dict(list(found.items())[:PANELS])
    columns = min(2, len(shown))
    rows = -(-len(shown) // columns)
    with drawing():
        figure = new_figure(560, 40 + (260 if columns > 1 else 400) * rows)
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for ax, (label, total) in zip(axes, shown.items(), strict=False):
            _cells(ax, total, classes)
            ax.set_title(short(label))
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        settle(figure)
    data: list[tuple[DataCell, ...]] = [
        (label, classes[i], classes[j] if j < len(classes) else "not finite", int(counts[i, j]))
        for label, counts in found.items()
        for i in range(counts.shape[0])
        for j in range(counts.shape[1])
    ]
    right = "; ".join(f"{k}: {100 * np.trace(m) / m.sum():.1f} % on the diagonal" for k, m in found.items())
    return Chart(
        "confusion",
        "Confusion matrix",
        "Row: true class. Column: predicted class. Shade: share of the row. All seeds together.",
        f"Confusion on the test set. {right}.",
        figure,
        ("method", "true", "predicted", "count"),
        data,
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
    """Reliability diagram (Guo et al. 2017): accuracy against confidence, seeds pooled by count."""
    found = {label: _calibration(own) for label, own in by_label(runs).items()}
    found = {label: points for label, points in found.items() if points}
    if not found:
        return None
    with drawing():
        figure = new_figure(560, 420)
        ax = figure.add_subplot()
        ax.plot((0, 100), (0, 100), color=MUTED, linewidth=1, zorder=0)
        for label, points in found.items():
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
    error = {k: sum(n * abs(a - c) for c, a, n in p) / sum(n for *_, n in p) for k, p in found.items()}
    return Chart(
        "calibration",
        "Calibration",
        "On the grey line a confidence of 80 % is right in 80 of 100 cases; below it the model is too sure. "
        "Large dots hold many cases.",
        "Expected calibration error: " + ", ".join(f"{k} {100 * e:.1f} %" for k, e in error.items()),
        figure,
        ("method", "confidence", "accuracy", "count"),
        [(label, *point) for label, points in found.items() for point in points],
        legend=legend(found, styles),
    )


def _calibration(runs: Sequence[Run]) -> list[tuple[float, float, int]]:
    """(confidence, accuracy, count) of every bin that holds a sample."""
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
