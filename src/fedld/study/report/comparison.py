"""The comparison at a glance: paired differences with intervals, and the loss terms behind the winner."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from fedld.study.accounts import Explanation
from fedld.study.comparison import Comparison
from fedld.study.report.chart import Chart, Look, settle, short
from fedld.study.report.style import INK, MUTED, SURFACE, TERM_COLOURS, drawing, new_figure
from fedld.study.verdict import signed


def difference_chart(comparison: Comparison, styles: Mapping[str, Look]) -> Chart | None:
    """Forest plot: every method's paired difference to the baseline with its 95 % interval."""
    tested = [(s, s.difference) for s in reversed(comparison.ranked) if s.difference is not None]
    if not tested:
        return None
    shown = comparison.shown
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
            f"{shown.title} minus {short(comparison.baseline)}'s{' (points)' if shown.points else ''}"
        )
        settle(figure)
    said = [
        f"{s.label} {signed(d.mean, shown.digits)}{shown.points}{_interval(d.interval, shown.digits)}"
        for s, d in reversed(tested)
    ]
    return Chart(
        "difference",
        f"Difference to {comparison.baseline}",
        f"Dot: mean over paired {comparison.unit}s. Line: 95 % interval; where it crosses 0, chance may "
        "explain it.",
        f"Paired difference of final {shown.title} to {comparison.baseline}: {'; '.join(said)}.",
        figure,
        ("method", "seeds", "difference", "low", "high", "p_holm"),
        [
            (s.label, d.n, d.mean, *(d.interval or (None, None)), s.p_value)
            for s, d in reversed(tested)
        ],
    )  # fmt: skip


def _interval(interval: tuple[float, float] | None, digits: int) -> str:
    if interval is None:
        return ""
    return f" (95 % interval {signed(interval[0], digits)} to {signed(interval[1], digits)})"


def explanation_chart(winner: str, rival: str, found: Explanation) -> Chart:
    """Difference of every loss term between the winner and its rival; they add up to the last bar."""
    names = [*found.terms, "total"]
    values = [*found.terms.values(), found.total]
    with drawing():
        figure = new_figure(400, 250)
        ax = figure.add_subplot()
        colours = [*(TERM_COLOURS[t] for t in found.terms), INK]
        bars = ax.barh(range(4), values, color=colours, height=0.55)
        ax.bar_label(bars, [signed(v, 3) for v in values], padding=4, fontsize=10)
        _error_bars(ax, found)
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
    said = ", ".join(f"{name} {signed(value, 4)}" for name, value in zip(names, values, strict=True))
    return Chart(
        "explanation",
        "Which loss term explains it",
        f"Eq. 2 after round {found.round}, mean over {found.seeds} paired {found.unit}(s); "
        "left of 0 is better." + (" Thin lines: 95 % intervals." if found.seeds > 1 else ""),
        f"Difference of the loss terms between {winner} and {rival}: {said}.",
        figure,
        ("term", "difference", "low", "high"),
        [
            (name, value, *(found.intervals.get(name) or (None, None)))
            for name, value in zip(names, values, strict=True)
        ],
    )


def _error_bars(ax: Axes, found: Explanation) -> None:
    for y, term in enumerate(found.terms):
        if interval := found.intervals[term]:
            ax.plot(interval, (y + 0.36, y + 0.36), color=MUTED, linewidth=1.5)
