"""Charts of update conflict: the principal spectrum, and steps whose length the clients measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator

from fedld.analysis.updates import chosen_step
from fedld.records.reader import Run, by_label, longest_run
from fedld.records.schema import TrialRecord
from fedld.study.report.chart import Chart, Look, legend, settle, short
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


def measured_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """The chosen candidate of every round and its measured gain over the plain average."""
    found: dict[str, list[tuple[int, TrialRecord]]] = {}
    for label, own in by_label(runs).items():
        lines = longest_run(own).conflict.lines
        trials = [(line["round"], trial) for line in lines if (trial := line.get("trial"))]
        if trials:
            found[label] = trials
    if not found:
        return None
    order = sorted({_key(trial) for trials in found.values() for _, trial in trials})
    with drawing():
        figure = new_figure(1140, 120 + max(160, 24 * len(order)))
        left, right = figure.subplots(1, 2)
        for k, (label, trials) in enumerate(found.items()):
            rounds, look = [r for r, _ in trials], styles[label]
            shift = 0.12 * (k - (len(found) - 1) / 2)
            heights = [order.index(_key(trial)) + shift for _, trial in trials]
            (dots,) = left.plot(
                rounds, heights, "o", color=look.colour, markersize=8, markeredgecolor=SURFACE
            )
            (line,) = right.plot(rounds, [trial["gain"] for _, trial in trials], marker="o", **look.plot)
            for part in (dots, line):
                part.set_gid(f"part-series-{look.slot}")
        left.set_yticks(range(len(order)), [name for _, _, name in order])
        left.set_ylim(-0.6, len(order) - 0.4)
        left.set_title("Step that was measured as best")
        right.set_title("Measured gain in loss over the plain average")
        right.axhline(0, color=MUTED, linewidth=1, zorder=0)
        for ax in (left, right):
            ax.set_xlabel("round")
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        settle(figure)
    said = [
        f"{label}: another step than the average in {sum(t['chosen'] != 0 for _, t in trials)} of "
        f"{len(trials)} rounds"
        for label, trials in found.items()
    ]
    return Chart(
        "measured-steps",
        "Steps that the clients measured",
        "Lengths are multiples of the rule's own step. Where the plain average wins, nothing was gained.",
        "; ".join(said) + ".",
        figure,
        ("method", "round", "rule", "length", "gain", "fallback"),
        [
            (label, r, t["rules"][t["chosen"]], t["lengths"][t["chosen"]], t["gain"], t["fallback"])
            for label, trials in found.items()
            for r, t in trials
        ],
        legend=legend(found, styles),
        wide=True,
    )


def _key(trial: TrialRecord) -> tuple[str, float, str]:
    """Order of the candidates: by rule, then by length; the plain average first."""
    if not trial["chosen"]:
        return "", 1.0, "plain average"
    rule, length = trial["rules"][trial["chosen"]], float(trial["lengths"][trial["chosen"]])
    return rule, length, chosen_step(trial).replace(" at ", " × ").removesuffix(" times its length")
