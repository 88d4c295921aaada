"""Principal axes of the updates: their energy, and how many clients vote for and against each."""

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from fedld.records.reader import Run, by_label, longest_run
from fedld.study.report.chart import Chart, settle, short
from fedld.study.report.style import MUTED, SERIES, SURFACE, drawing, new_figure

AXES = 12
PANELS = 9


def spectrum_chart(runs: Sequence[Run]) -> Chart | None:
    """Share of every axis in the last round, split by the clients that point along it or against it."""
    last = {label: _last(longest_run(own)) for label, own in list(by_label(runs).items())[:PANELS]}
    found = {label: line for label, line in last.items() if line is not None}
    if not found:
        return None
    columns = 1 if len(found) <= 4 else 2
    rows = -(-len(found) // columns)
    with drawing():
        figure = new_figure(560, 80 + 128 * rows)
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for ax, (label, line) in zip(axes, found.items(), strict=False):
            _draw(ax, line)
            ax.set_title(f"{short(label)}, round {line['round']}")
        axes[0].set_ylim(0, 1.25 * max(axis[0] for line in found.values() for axis in line["axes"]))
        for ax in axes[len(found) :]:
            ax.set_visible(False)
        figure.supxlabel("principal axis", fontsize=11)
        figure.supylabel("share of energy (%)", fontsize=11)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
        settle(figure)
    first = {label: line["axes"][0] for label, line in found.items()}
    return Chart(
        "spectrum",
        "Principal spectrum with votes",
        "Above the bars: clients for : against. An axis with as many against it as for it is a conflict, "
        "not a common direction. Grey: not used.",
        "First axis: "
        + "; ".join(f"{k} {a[0]:.0f} % of energy, {a[1]} for, {a[2]} against" for k, a in first.items()),
        figure,
        ("method", "round", "axis", "energy_percent", "votes_for", "votes_against", "kept"),
        [
            (label, line["round"], k + 1, *axis, int(k < line["kept"]))
            for label, line in found.items()
            for k, axis in enumerate(line["axes"])
        ],
    )


def _last(run: Run) -> dict[str, Any] | None:
    """Axes of the last round as (energy in percent, votes for, votes against)."""
    for line in reversed(run.conflict.lines):
        values = [v for v in line.get("eigenvalues") or [] if isinstance(v, int | float)]
        total = sum(values)
        if total > 0:
            votes = zip(line.get("votes_for") or [], line.get("votes_against") or [], strict=False)
            padded = [*votes, *[(0, 0)] * len(values)]
            axes = [(100 * v / total, *padded[k]) for k, v in enumerate(values[:AXES])]
            return {"round": line["round"], "axes": axes, "kept": line.get("kept") or 0}
    return None


def _draw(ax: Any, line: dict[str, Any]) -> None:
    """Blue: the part of the bar that belongs to votes for, red: against, grey: an axis that is not used."""
    for k, (energy, plus, minus) in enumerate(line["axes"]):
        votes = plus + minus
        share = energy * plus / votes if votes else 0.0
        if votes:
            ax.bar(k + 1, share, 0.7, color=SERIES[0], edgecolor=SURFACE, label="" if k else "votes for")
            ax.bar(
                k + 1, energy - share, 0.7, share, color=SERIES[5], edgecolor=SURFACE,
                label="" if k else "votes against",
            )  # fmt: skip
            ax.annotate(
                f"{plus}:{minus}",
                (k + 1, energy),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        else:
            ax.bar(k + 1, energy, 0.7, color=MUTED, edgecolor=SURFACE)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)
