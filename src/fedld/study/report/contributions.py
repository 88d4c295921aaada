"""Which clients the loss terms come from, in the last decomposed round."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedld.analysis import decompose_line
from fedld.records.reader import Run, by_label, longest_run
from fedld.study.report.chart import Chart, Floats, Look, legend, settle, short
from fedld.study.report.style import MUTED, SURFACE, drawing, new_figure

SHOWN = 16  # clients, those with the largest terms


def contributions_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Shift of every client's model and what aggregation does to every client's data, one dot a method."""
    found: dict[str, tuple[int, Floats, Floats]] = {}
    for label, own in by_label(runs).items():
        lines = longest_run(own).cross_loss.lines
        decomposed = [(line, d) for line in lines if (d := decompose_line(line)) is not None]
        if decomposed:
            line, d = decomposed[-1]
            shift = np.full(len(line["clients"]), np.nan)
            shift[list(d.sampled)] = d.shift_by_model
            found[label] = (line["round"], shift, d.aggregation_by_client)
    if not found:
        return None
    names = list(longest_run(runs).client_names.values())
    order = _largest([np.abs(shift) + np.abs(merged) for _, shift, merged in found.values()], len(names))
    with drawing():
        figure = new_figure(560, 90 + max(150, 26 * len(order)))
        axes = figure.subplots(1, 2, sharey=True)
        for ax, k, title in ((axes[0], 0, "Shift of its model"), (axes[1], 1, "Aggregation, its data")):
            for label, values in found.items():
                terms = values[1:][k]
                points = [terms[i] if i < len(terms) else np.nan for i in order]
                (dots,) = ax.plot(
                    points, range(len(order)), "o", color=styles[label].colour, markersize=8,
                    markeredgecolor=SURFACE, markeredgewidth=1.5,
                )  # fmt: skip
                dots.set_gid(f"part-series-{styles[label].slot}")
            ax.axvline(0, color=MUTED, linewidth=1, zorder=0)
            ax.set_title(title)
            ax.locator_params(axis="x", nbins=5)
            ax.spines["left"].set_visible(False)
            ax.tick_params(axis="y", length=0)
        axes[0].set_yticks(range(len(order)), [short(names[i], 16) for i in order], fontsize=9.5)
        axes[0].invert_yaxis()
        figure.supxlabel("loss", fontsize=11)
        settle(figure)
    first, (_, shift, merged) = next(iter(found.items()))
    return Chart(
        "contributions",
        "Which clients the terms come from",
        "Right of 0 costs. Left: how much worse a client's model is elsewhere than at home. "
        "Right: what merging the models costs a client's data."
        + (f" The {SHOWN} largest of {len(names)} clients." if len(names) > SHOWN else ""),
        f"{first}: largest shift at {names[int(np.nanargmax(shift))]}, "
        f"most hurt by aggregation {names[int(np.nanargmax(merged))]}.",
        figure,
        ("method", "round", "client", "shift_of_model", "aggregation_on_data"),
        [
            (label, at, names[i], float(shift[i]), float(merged[i]))
            for label, (at, shift, merged) in found.items()
            for i in range(min(len(names), len(merged)))
        ],
        legend=legend(found, styles),
    )


def _largest(sizes: Sequence[np.ndarray], count: int) -> list[int]:
    """The clients with the largest terms under any method, in their own order."""
    padded = np.array([np.pad(s[:count], (0, count - len(s[:count]))) for s in sizes])
    weight = np.nan_to_num(padded, posinf=1e9).max(axis=0)
    return sorted(np.argsort(-weight, kind="stable")[:SHOWN].tolist())
