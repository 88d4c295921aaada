"""Charts of the loss decomposition: its terms over rounds, and what every client contributes."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedld.analysis import decompose_line
from fedld.records.reader import Run, by_label, longest_run
from fedld.records.schema import RoundColumn
from fedld.study.reasons import TERMS
from fedld.study.report.chart import (
    INK,
    MUTED,
    SURFACE,
    TERM_COLOURS,
    Band,
    Chart,
    Floats,
    Hover,
    LegendKey,
    Look,
    drawing,
    hover_of,
    legend,
    new_figure,
    settle,
    short,
)
from fedld.study.report.curves import bands_of, column

COLUMNS = 3
PANELS = 12
CSS = {"local": "var(--axis)", "shift": "var(--s7)", "aggregation": "var(--s4)", "global": "var(--ink)"}


def terms_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw signed terms, stacked away from 0 on both sides; the line is their sum, the global loss."""
    keys: dict[str, RoundColumn] = {**TERMS, "global": "global_loss"}
    bands = {term: bands_of(runs, column(key)) for term, key in keys.items()}
    labels = [label for label in bands["global"] if all(label in bands[term] for term in TERMS)][:PANELS]
    if not labels:
        return None
    columns = min(COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    with drawing():
        figure = new_figure(1140 if columns > 1 else 560, 60 + 240 * rows)
        axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)).ravel()
        for ax, label in zip(axes, labels, strict=False):
            _stack(ax, {term: bands[term][label] for term in bands})
            ax.set_title(short(label))
        for ax in axes[len(labels) :]:
            ax.set_visible(False)
        figure.supxlabel("round", fontsize=11)
        figure.supylabel("loss", fontsize=11)
        settle(figure)
    hovers: list[Hover] = [
        hover_of(ax, {t: (bands[t][label].x, bands[t][label].mean) for t in bands}, CSS)
        for ax, label in zip(axes, labels, strict=False)
    ]
    last = [(label, {t: float(bands[t][label].mean[-1]) for t in bands}) for label in labels]
    return Chart(
        name="decomposition",
        title="Loss decomposition over rounds",
        note=(
            "Mean over seeds. The signed areas add up to the line, the global model's loss on all clients' "
            "data."
        ),
        summary="Last round: "
        + "; ".join(
            f"{k}: local {t['local']:.3f}, shift {t['shift']:.3f}, aggregation {t['aggregation']:.3f}, "
            f"global {t['global']:.3f}"
            for k, t in last
        ),
        figure=figure,
        columns=("method", "round", *TERMS, "global"),
        rows=[
            (label, int(r), *(float(bands[t][label].mean[k]) for t in bands))
            for label in labels
            for k, r in enumerate(bands["global"][label].x)
        ],
        hover=hovers,
        legend=[LegendKey(term, colour, f"part-term-{term}") for term, colour in CSS.items()],
        wide=columns > 1,
    )


def _stack(ax: Axes, bands: dict[str, Band]) -> None:
    """Stack positive parts upwards and negative parts downwards: a term may change sign between rounds."""
    x = bands["global"].x
    above, below = np.zeros_like(x), np.zeros_like(x)
    for term in TERMS:
        value = bands[term].mean
        up, down = np.maximum(value, 0), np.minimum(value, 0)
        for base, part in ((above, up), (below, down)):
            area = ax.fill_between(x, base, base + part, color=TERM_COLOURS[term], linewidth=0, alpha=0.85)
            area.set_gid(f"part-term-{term}")
        above, below = above + up, below + down
    (line,) = ax.plot(x, bands["global"].mean, color=INK, linewidth=1.75, marker="o" if len(x) < 3 else "")
    line.set_gid("part-term-global")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.02)


SHOWN = 16  # clients, those with the largest terms


def contributions_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Shift of every client's model and what aggregation does to every client's data, one dot a method."""
    terms_by_method: dict[str, tuple[int, Floats, Floats]] = {}
    for label, method_runs in by_label(runs).items():
        lines = longest_run(method_runs).cross_loss.lines
        decomposed = [(line, d) for line in lines if (d := decompose_line(line)) is not None]
        if decomposed:
            line, d = decomposed[-1]
            shift = np.full(len(line["clients"]), np.nan)
            shift[list(d.sampled)] = d.shift_by_model
            terms_by_method[label] = (line["round"], shift, d.aggregation_by_client)
    if not terms_by_method:
        return None
    names = list(longest_run(runs).client_names.values())
    order = _largest(
        [np.abs(shift) + np.abs(merged) for _, shift, merged in terms_by_method.values()], len(names)
    )
    with drawing():
        figure = new_figure(560, 90 + max(150, 26 * len(order)))
        axes = figure.subplots(1, 2, sharey=True)
        for ax, k, title in ((axes[0], 0, "Shift of its model"), (axes[1], 1, "Aggregation, its data")):
            for label, values in terms_by_method.items():
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
    first, (_, shift, merged) = next(iter(terms_by_method.items()))
    return Chart(
        name="contributions",
        title="Which clients the terms come from",
        note="Right of 0 costs. Left: how much worse a client's model is elsewhere than at home. "
        "Right: what merging the models costs a client's data."
        + (f" The {SHOWN} largest of {len(names)} clients." if len(names) > SHOWN else ""),
        summary=f"{first}: largest shift at {names[int(np.nanargmax(shift))]}, "
        f"most hurt by aggregation {names[int(np.nanargmax(merged))]}.",
        figure=figure,
        columns=("method", "round", "client", "shift_of_model", "aggregation_on_data"),
        rows=[
            (label, at, names[i], float(shift[i]), float(merged[i]))
            for label, (at, shift, merged) in terms_by_method.items()
            for i in range(min(len(names), len(merged)))
        ],
        legend=legend(terms_by_method, styles),
    )


def _largest(sizes: Sequence[np.ndarray], count: int) -> list[int]:
    """Choose the clients with the largest terms under any method, in their own order."""
    padded = np.array([np.pad(s[:count], (0, count - len(s[:count]))) for s in sizes])
    weight = np.nan_to_num(padded, posinf=1e9).max(axis=0)
    return sorted(np.argsort(-weight, kind="stable")[:SHOWN].tolist())
