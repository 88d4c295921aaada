"""Charts of methods: measures over rounds and against traffic, differences, and what explains them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from fedld.records.reader import Run, by_label, longest_run, number
from fedld.records.schema import RoundColumn
from fedld.study.comparison import Comparison
from fedld.study.measures import measures_of
from fedld.study.reasons import Explanation
from fedld.study.report.chart import (
    INK,
    MUTED,
    SURFACE,
    TERM_COLOURS,
    Band,
    Chart,
    Floats,
    Look,
    band,
    draw_bands,
    drawing,
    hover_of,
    legend,
    new_figure,
    settle,
    short,
)
from fedld.study.verdict import signed
from fedld.tasks.measure import Measure


def bands_of(runs: Sequence[Run], series: Callable[[Run], Mapping[int, float]]) -> dict[str, Band]:
    """Compute mean and range of a number over the seeds of every method that has it."""
    bands = {}
    for label, method_runs in by_label(runs).items():
        made = band([dict(series(run)) for run in method_runs])
        if made is not None:
            bands[label] = made
    return bands


def scores_of(measure: Measure) -> Callable[[Run], Mapping[int, float]]:
    """Make a reader of a measure of the test set in every round, scaled; nan where it was not evaluated."""

    def series(run: Run) -> Mapping[int, float]:
        scores = {line["round"]: float("nan") for line in run.rounds.lines} | run.scores(measure.name)
        return {round_: measure.scaled(value) for round_, value in scores.items()}

    return series


def column(key: RoundColumn) -> Callable[[Run], Mapping[int, float]]:
    """Make a reader of a column of every round."""
    return lambda run: run.series(key)


def curves(runs: Sequence[Run]) -> list[Measure]:
    """List the measures that have a value in some round, the first one first."""
    return [measure for measure in measures_of(runs).values() if bands_of(runs, scores_of(measure))]


def measure_chart(
    runs: Sequence[Run], measure: Measure, styles: Mapping[str, Look], size: tuple[int, int] = (560, 300)
) -> Chart | None:
    """Draw one measure over rounds."""
    bands = bands_of(runs, scores_of(measure))
    title = measure.title[:1].upper() + measure.title[1:]
    return line_chart(measure.name, title, measure.unit, bands, styles=styles, size=size) if bands else None


def line_chart(
    key: str, name: str, unit: str, bands: dict[str, Band], styles: Mapping[str, Look], size: tuple[int, int]
) -> Chart:
    """Draw lines over rounds with bands over seeds."""
    with drawing():
        figure = new_figure(*size)
        ax = figure.add_subplot()
        draw_bands(ax, bands, styles)
        ax.set(xlabel="round", ylabel=f"{name} ({unit})" if unit else name)
        settle(figure)
    last = ", ".join(f"{label} {b.mean[-1]:.4g}{unit}" for label, b in bands.items())
    return Chart(
        name=key.replace("_", "-"),
        title=name,
        note="Line: mean over seeds. Band: lowest to highest seed.",
        summary=f"{name} over rounds. In the last round: {last}.",
        figure=figure,
        columns=("method", "round", "mean", "lowest", "highest"),
        rows=[(label, *row) for label, b in bands.items() for row in _rows(b)],
        hover=[hover_of(ax, {label: (b.x, b.mean) for label, b in bands.items()}, colours(styles))],
        legend=legend(bands, styles),
    )


def colours(styles: Mapping[str, Look]) -> dict[str, str]:
    """Give the CSS colour of every method."""
    return {label: look.css for label, look in styles.items()}


def _rows(b: Band) -> list[tuple[int, float, float, float]]:
    return [
        (int(x), float(m), float(lo), float(hi))
        for x, m, lo, hi in zip(b.x, b.mean, b.low, b.high, strict=True)
    ]


STEP: tuple[RoundColumn, RoundColumn] = ("norm_ratio", "cosine_to_average")


def step_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw the step's length and its angle to the plain average: small or opposed steps mean conflict."""
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
        name="server-step",
        title="The server's step against the plain average",
        note=(
            "Far below 1: clients' updates cancel. A cosine below 0: the step goes against the average "
            "client."
        ),
        summary="Length ratio and cosine of the aggregated update to the weighted average, over rounds.",
        figure=figure,
        columns=("method", "round", "norm_ratio", "cosine_to_average"),
        rows=rows,
        hover=hovers,
        legend=legend(ratio, styles),
        wide=True,
    )


def _merged(a: Band, b: Band | None) -> list[tuple[int, float, float | None]]:
    other = dict(zip(b.x, b.mean, strict=True)) if b is not None else {}
    return [(int(x), float(m), other.get(x)) for x, m in zip(a.x, a.mean, strict=True)]


def traffic_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw the first measure against bytes sent."""
    measure = next(iter(measures_of(runs).values()))
    title = measure.title[:1].upper() + measure.title[1:]
    lines: dict[str, tuple[Floats, Floats]] = {}
    for label, method_runs in by_label(runs).items():
        b, sent = bands_of(method_runs, scores_of(measure)).get(label), _megabytes(longest_run(method_runs))
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
        name="traffic",
        title=f"{title} against communication",
        note="Counted, not estimated: shared weights and every message of the method, up and down.",
        summary=f"{title} over megabytes sent. "
        + ", ".join(f"{k}: {measure.format(y[-1])} after {x[-1]:.1f} MB" for k, (x, y) in lines.items()),
        figure=figure,
        columns=("method", "megabytes", measure.name),
        rows=[(k, float(a), float(b)) for k, (x, y) in lines.items() for a, b in zip(x, y, strict=True)],
        hover=[hover_of(ax, lines, colours(styles)) | {"unit": "MB"}],
        legend=legend(lines, styles),
    )


def _megabytes(run: Run) -> dict[int, float]:
    """Add up the MB sent until the end of every round."""
    total, megabytes = 0.0, {}
    for line in run.rounds.lines:
        total += (number(line.get("bytes_up")) + number(line.get("bytes_down"))) / 1e6
        megabytes[line["round"]] = total
    return megabytes


def difference_chart(comparison: Comparison, styles: Mapping[str, Look]) -> Chart | None:
    """Draw a forest plot: every method's paired difference to the baseline with its 95 % interval."""
    tested = [(s, s.difference) for s in reversed(comparison.ranked) if s.difference is not None]
    if not tested:
        return None
    measure = comparison.primary_measure
    with drawing():
        figure = new_figure(400, max(250, 70 + 30 * len(tested)))
        ax = figure.add_subplot()
        for y, (standing, d) in enumerate(tested):
            colour = styles[standing.label].colour
            if d.interval:
                ax.plot(d.interval, (y, y), color=colour, linewidth=2)
            ax.plot(d.mean, y, "o", color=colour, markersize=9, markeredgecolor=SURFACE, markeredgewidth=2)
        ax.axvline(0, color=MUTED, linewidth=1, zorder=0)
        ax.set_yticks(range(len(tested)), [short(s.label) for s, _ in tested])
        ax.set_ylim(-0.6, len(tested) - 0.4)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(
            f"{measure.title} minus {short(comparison.baseline)}'s{' (points)' if measure.points else ''}"
        )
        settle(figure)
    sentences = [
        f"{s.label} {signed(d.mean, measure.digits)}{measure.points}{_interval(d.interval, measure.digits)}"
        for s, d in reversed(tested)
    ]
    return Chart(
        name="difference",
        title=f"Difference to {comparison.baseline}",
        note=f"Dot: mean over paired {comparison.unit}s. Line: 95 % interval; where it crosses 0, chance may "
        "explain it.",
        summary=(
            f"Paired difference of final {measure.title} to {comparison.baseline}: "
            f"{'; '.join(sentences)}."
        ),
        figure=figure,
        columns=("method", "seeds", "difference", "low", "high", "p_holm"),
        rows=[
            (s.label, d.n, d.mean, *(d.interval or (None, None)), s.p_value)
            for s, d in reversed(tested)
        ],
    )  # fmt: skip


def _interval(interval: tuple[float, float] | None, digits: int) -> str:
    if interval is None:
        return ""
    return f" (95 % interval {signed(interval[0], digits)} to {signed(interval[1], digits)})"


def explanation_chart(winner: str, rival: str, explanation: Explanation) -> Chart:
    """Draw the difference of every loss term between winner and rival; they add up to the last bar."""
    names = [*explanation.terms, "total"]
    values = [*explanation.terms.values(), explanation.total]
    with drawing():
        figure = new_figure(400, 250)
        ax = figure.add_subplot()
        colours = [*(TERM_COLOURS[t] for t in explanation.terms), INK]
        bars = ax.barh(range(4), values, color=colours, height=0.55)
        ax.bar_label(bars, [signed(v, 3) for v in values], padding=4, fontsize=10)
        _error_bars(ax, explanation)
        ax.axvline(0, color=MUTED, linewidth=1)
        ax.set_yticks(range(4), ["local", "shift", "aggregation", "= global loss"])
        ax.invert_yaxis()
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.24)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel(f"loss of {short(winner, 16)} minus {short(rival, 16)}")
        settle(figure)
    summary = ", ".join(f"{name} {signed(value, 4)}" for name, value in zip(names, values, strict=True))
    return Chart(
        name="explanation",
        title="Which loss term explains it",
        note=f"Eq. 2 after round {explanation.round}, mean over {explanation.seeds} paired "
        f"{explanation.unit}(s); "
        "left of 0 is better." + (" Thin lines: 95 % intervals." if explanation.seeds > 1 else ""),
        summary=f"Difference of the loss terms between {winner} and {rival}: {summary}.",
        figure=figure,
        columns=("term", "difference", "low", "high"),
        rows=[
            (name, value, *(explanation.intervals.get(name) or (None, None)))
            for name, value in zip(names, values, strict=True)
        ],
    )


def _error_bars(ax: Axes, explanation: Explanation) -> None:
    for y, term in enumerate(explanation.terms):
        if interval := explanation.intervals[term]:
            ax.plot(interval, (y + 0.36, y + 0.36), color=MUTED, linewidth=1.5)
