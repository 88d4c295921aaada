"""Measures over rounds: accuracy, AUROC, loss, step length, and accuracy against traffic."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedld.records.reader import Run, by_label, longest_run, number
from fedld.records.schema import RoundColumn
from fedld.study.measures import measures_of
from fedld.study.report.chart import (
    Band,
    Chart,
    Floats,
    Look,
    band,
    draw_bands,
    hover_of,
    legend,
    settle,
    short,
)
from fedld.study.report.style import MUTED, drawing, new_figure
from fedld.tasks.measure import Measure


def bands_of(runs: Sequence[Run], series: Callable[[Run], Mapping[int, float]]) -> dict[str, Band]:
    """Mean and range of a number over the seeds of every method that has it."""
    found = {}
    for label, own in by_label(runs).items():
        made = band([dict(series(run)) for run in own])
        if made is not None:
            found[label] = made
    return found


def scores_of(measure: Measure) -> Callable[[Run], Mapping[int, float]]:
    """A measure of the test set in every round, as it is shown; nan where it was not evaluated."""

    def series(run: Run) -> Mapping[int, float]:
        scores = {line["round"]: float("nan") for line in run.rounds.lines} | run.scores(measure.name)
        return {round_: measure.scaled(value) for round_, value in scores.items()}

    return series


def column(key: RoundColumn) -> Callable[[Run], Mapping[int, float]]:
    """A number of every round beside the measures."""
    return lambda run: run.series(key)


def curves(runs: Sequence[Run]) -> list[Measure]:
    """The measures that have a value in some round, the first one first."""
    return [measure for measure in measures_of(runs).values() if bands_of(runs, scores_of(measure))]


def measure_chart(
    runs: Sequence[Run], measure: Measure, styles: Mapping[str, Look], size: tuple[int, int] = (560, 300)
) -> Chart | None:
    """One measure over rounds."""
    bands = bands_of(runs, scores_of(measure))
    title = measure.title[:1].upper() + measure.title[1:]
    return line_chart(measure.name, title, measure.unit, bands, styles, size) if bands else None


def line_chart(
    key: str, name: str, unit: str, bands: dict[str, Band], styles: Mapping[str, Look], size: tuple[int, int]
) -> Chart:
    """Lines over rounds with bands over seeds."""
    with drawing():
        figure = new_figure(*size)
        ax = figure.add_subplot()
        draw_bands(ax, bands, styles)
        ax.set(xlabel="round", ylabel=f"{name} ({unit})" if unit else name)
        settle(figure)
    last = ", ".join(f"{label} {b.mean[-1]:.4g}{unit}" for label, b in bands.items())
    return Chart(
        key.replace("_", "-"),
        name,
        "Line: mean over seeds. Band: lowest to highest seed.",
        f"{name} over rounds. In the last round: {last}.",
        figure,
        ("method", "round", "mean", "lowest", "highest"),
        [(label, *row) for label, b in bands.items() for row in _rows(b)],
        [hover_of(ax, {label: (b.x, b.mean) for label, b in bands.items()}, colours(styles))],
        legend(bands, styles),
    )


def colours(styles: Mapping[str, Look]) -> dict[str, str]:
    """CSS colour of every method."""
    return {label: look.css for label, look in styles.items()}


def _rows(b: Band) -> list[tuple[int, float, float, float]]:
    return [
        (int(x), float(m), float(lo), float(hi))
        for x, m, lo, hi in zip(b.x, b.mean, b.low, b.high, strict=True)
    ]


STEP: tuple[RoundColumn, RoundColumn] = ("norm_ratio", "cosine_to_average")


def step_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Length of the server's step and its angle to the plain average: small or opposed means conflict."""
    ratio, cosine = (bands_of(runs, column(key)) for key in STEP)
    if not ratio or not cosine:
        return None
    with drawing():
        figure = new_figure(1140, 280)
        left, right = figure.subplots(1, 2)
        for ax, bands, title in (
            (left, ratio, "Step length / average's"),
            (right, cosine, "Cosine to average"),
        ):
            draw_bands(ax, bands, styles)
            ax.axhline(1, color=MUTED, linewidth=1, zorder=0)
            ax.set(xlabel="round", title=title)
        settle(figure)
    hovers = [
        hover_of(ax, {label: (b.x, b.mean) for label, b in bands.items()}, colours(styles))
        for ax, bands in ((left, ratio), (right, cosine))
    ]
    rows = [(label, *row) for label, b in ratio.items() for row in _merged(b, cosine.get(label))]
    return Chart(
        "server-step",
        "The server's step against the plain average",
        "Far below 1: clients' updates cancel. A cosine below 0: the step goes against the average client.",
        "Length ratio and cosine of the aggregated update to the weighted average, over rounds.",
        figure,
        ("method", "round", "norm_ratio", "cosine_to_average"),
        rows,
        hovers,
        legend(ratio, styles),
        wide=True,
    )


def _merged(a: Band, b: Band | None) -> list[tuple[int, float, float | None]]:
    other = dict(zip(b.x, b.mean, strict=True)) if b is not None else {}
    return [(int(x), float(m), other.get(x)) for x, m in zip(a.x, a.mean, strict=True)]


def traffic_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """The first measure against bytes sent: what a method's extra messages buy."""
    measure = next(iter(measures_of(runs).values()))
    title = measure.title[:1].upper() + measure.title[1:]
    lines: dict[str, tuple[Floats, Floats]] = {}
    for label, own in by_label(runs).items():
        b, sent = bands_of(own, scores_of(measure)).get(label), _megabytes(longest_run(own))
        if b is not None:
            lines[label] = (np.array([sent.get(int(r), np.nan) for r in b.x]), b.mean)
    if not lines:
        return None
    with drawing():
        figure = new_figure(560, 300)
        ax = figure.add_subplot()
        for label, (x, y) in lines.items():
            (line,) = ax.plot(
                x, y, label=short(label), marker="o" if len(x) < 3 else "", **styles[label].plot
            )
            line.set_gid(f"part-series-{styles[label].slot}")
        ax.set(xlabel="MB sent, both ways", ylabel=f"{title} ({measure.unit})" if measure.unit else title)
        ax.grid(axis="x", visible=False)
        settle(figure)
    return Chart(
        "traffic",
        f"{title} against communication",
        "Counted, not estimated: shared weights and every message of the method, up and down.",
        f"{title} over megabytes sent. "
        + ", ".join(f"{k}: {measure.format(y[-1])} after {x[-1]:.1f} MB" for k, (x, y) in lines.items()),
        figure,
        ("method", "megabytes", measure.name),
        [(k, float(a), float(b)) for k, (x, y) in lines.items() for a, b in zip(x, y, strict=True)],
        [hover_of(ax, lines, colours(styles)) | {"unit": "MB"}],
        legend(lines, styles),
    )


def _megabytes(run: Run) -> dict[int, float]:
    """MB sent until the end of every round."""
    total, found = 0.0, {}
    for line in run.rounds.lines:
        total += (number(line.get("bytes_up")) + number(line.get("bytes_down"))) / 1e6
        found[line["round"]] = total
    return found
