"""The drawing of Fig. 2: shift and aggregation, signed above and absolute (as in the paper) below."""

from pathlib import Path

import matplotlib
import numpy as np

from fedld.study.paper.figure2 import CONTRASTS, Figure2

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"plain": "#555555", "margin": "#c23b3b", "principal": "#2f6db5", "measured": "#2a8a4a"}
NAMES = {"shift": "distribution shift loss", "aggregation": "aggregation loss"}
WIDE = 30  # largest over median value from which an axis is logarithmic away from 0
LABELS = {
    "plain": "naive",
    "margin": "with margin control",
    "principal": "with the principal rule",
    "measured": "with the measured rule",
}


def draw(figure2: Figure2, path: Path) -> None:
    """Write path.png and path.svg: mean over seeds, bands from the smallest to the largest."""
    with plt.rc_context({"svg.hashsalt": "fedld"}):
        figure, axes = plt.subplots(2, 2, figsize=(8.4, 6.4), sharex=True, layout="constrained")
        for row, absolute in enumerate((False, True)):
            for column, term in enumerate(CONTRASTS):
                _panel(axes[row][column], figure2, term, absolute)
        for ax in axes[1]:
            ax.set_xlabel("Dirichlet alpha (heterogeneity grows to the right)")
        seeds = len({point.seed for point in figure2.points})
        figure.suptitle(f"{figure2.title}\nmean and range over {seeds} seed(s)", fontsize=10)
        figure.savefig(path.with_suffix(".png"), dpi=300)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)


def _panel(ax: Axes, figure2: Figure2, term: str, absolute: bool) -> None:
    shown: list[float] = [0.0]
    for arm in ("plain", *CONTRASTS[term]):
        values = np.array([figure2.values(arm, term, alpha) for alpha in figure2.alphas])
        values, colour = np.abs(values) if absolute else values, COLOURS[arm]
        shown += values.flatten().tolist()
        style = "--" if arm == "plain" else "-"
        ax.plot(values.mean(1), style, marker="o", markersize=4, color=colour, label=LABELS[arm])
        ax.fill_between(
            range(len(values)), values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0
        )
    ax.axhline(0, color="0.6", linewidth=0.8)
    middle = float(np.median(np.abs(shown)))
    if max(map(abs, shown)) > WIDE * middle > 0:
        ax.set_yscale("symlog", linthresh=middle)
        ax.set_ylim(min(shown) * 1.5 - 0.1 * middle, max(shown) * 1.5 + 0.1 * middle)
    ax.set_xticks(range(len(figure2.alphas)), [f"{alpha:g}" for alpha in figure2.alphas])
    ax.set_title(f"{'|' if absolute else ''}{NAMES[term]}{'|' if absolute else ', signed'}", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
