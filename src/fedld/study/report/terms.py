"""The loss decomposition over rounds (Eq. 2) as signed stacked areas, one panel a method."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedld.records.reader import Run
from fedld.records.schema import RoundColumn
from fedld.study.accounts import TERMS
from fedld.study.report.chart import Band, Chart, Hover, LegendKey, hover_of, settle, short
from fedld.study.report.curves import bands_of, column
from fedld.study.report.style import INK, TERM_COLOURS, drawing, new_figure

COLUMNS = 3
PANELS = 12
CSS = {"local": "var(--axis)", "shift": "var(--s7)", "aggregation": "var(--s4)", "global": "var(--ink)"}


def terms_chart(runs: Sequence[Run]) -> Chart | None:
    """Signed terms, stacked away from 0 on both sides; the line is their sum, the global loss."""
    keys: dict[str, RoundColumn] = {**TERMS, "global": "global_loss"}
    found = {term: bands_of(runs, column(key)) for term, key in keys.items()}
    labels = [label for label in found["global"] if all(label in found[term] for term in TERMS)][:PANELS]
    if not labels:
        return None
    columns = min(COLUMNS, len(labels))
    rows = -(-len(labels) // columns)
    with drawing():
        figure = new_figure(1140 if columns > 1 else 560, 60 + 240 * rows)
        axes = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)).ravel()
        for ax, label in zip(axes, labels, strict=False):
            _stack(ax, {term: found[term][label] for term in found})
            ax.set_title(short(label))
        for ax in axes[len(labels) :]:
            ax.set_visible(False)
        figure.supxlabel("round", fontsize=11)
        figure.supylabel("loss", fontsize=11)
        settle(figure)
    hovers: list[Hover] = [
        hover_of(ax, {t: (found[t][label].x, found[t][label].mean) for t in found}, CSS)
        for ax, label in zip(axes, labels, strict=False)
    ]
    last = [(label, {t: float(found[t][label].mean[-1]) for t in found}) for label in labels]
    return Chart(
        "decomposition",
        "Loss decomposition over rounds",
        "Mean over seeds. The signed areas add up to the line, the global model's loss on all clients' data.",
        "Last round: "
        + "; ".join(
            f"{k}: local {t['local']:.3f}, shift {t['shift']:.3f}, aggregation {t['aggregation']:.3f}, "
            f"global {t['global']:.3f}"
            for k, t in last
        ),
        figure,
        ("method", "round", *TERMS, "global"),
        [
            (label, int(r), *(float(found[t][label].mean[k]) for t in found))
            for label in labels
            for k, r in enumerate(found["global"][label].x)
        ],
        hovers,
        [LegendKey(term, colour, f"part-term-{term}") for term, colour in CSS.items()],
        wide=columns > 1,
    )


def _stack(ax: Axes, bands: dict[str, Band]) -> None:
    """Positive parts upwards, negative parts downwards: a term may change sign between rounds."""
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
