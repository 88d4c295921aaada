"""Figures of the documentation, drawn from the tables in results/.

`python results/figures.py` writes to docs/figures (.png and .svg) sensitivity-rate and sensitivity-alpha, the
mean accuracy over seeds with its 95 % t interval against the learning rate or Dirichlet's alpha, and
loss-terms, what the global loss of the last round consists of (Eq. 2).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

from fedld.analysis import paired_difference

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
COLOURS = {
    "fedavg": "#333333",
    "fedexp": "#a65f3d",
    "scaffold": "#e08a2e",
    "fedld": "#c23b3b",
    "fedld-measured": "#4a9d6f",
    "fedld-drift": "#2f6db5",
    "central": "#999999",
}
NAMES = {"central": "pooled data"}
APART = 0.055  # of the panel's height: the least distance of two names


@dataclass(frozen=True)
class Panel:
    """One federation: its title and its studies' folders, a pattern whose group is the value on the axis."""

    title: str
    folders: str
    depth: float = 22  # points below the best that are shown


FIGURES = {
    "rate": (
        "learning rate",
        (
            Panel("chest X-rays, 12 sites", r"covid-head-lr([\d.]+)"),
            Panel("Retina, Dirichlet 0.1", r"retina-dirichlet0\.1-head-lr([\d.]+)"),
            Panel("fundus, Dirichlet 0.5", r"fundus-dirichlet0\.5-head-lr([\d.]+)", 6),
        ),
    ),
    "alpha": (
        "Dirichlet alpha (heterogeneity grows to the right)",
        (
            Panel("fundus, learning rate 0.01", r"fundus-dirichlet([\d.]+)-head-lr0\.01", 6),
            Panel("Retina, learning rate 0.01", r"retina-dirichlet([\d.]+)-head-lr0\.01"),
        ),
    ),
}

TERMS = {
    "chest X-rays, 12 sites": "covid-head-shared",
    "Retina, published list 3": "retina-split3-head-shared",
    "fundus, Dirichlet 0.5": "fundus-dirichlet0.5-head-shared",
}
"""Panels of the loss terms and their studies."""

Lines = dict[str, dict[float, list[float]]]
"""Method, value on the axis: final accuracy of every seed."""


def lines_of(panel: Panel, results: Path = ROOT / "results") -> Lines:
    """What the tables of a panel say of the methods that are drawn."""
    found: Lines = {}
    for path in results.glob("*/table.json"):
        if match := re.fullmatch(panel.folders, path.parent.name):
            for row in json.loads(path.read_text())["rows"]:
                if row["label"] in COLOURS and row["final"]:
                    found.setdefault(row["label"], {})[float(match[1])] = row["final"]
    return {label: dict(sorted(found[label].items())) for label in COLOURS if label in found}


def draw(name: str, folder: Path = ROOT / "docs" / "figures") -> None:
    """Write one figure, with the panels that have two values on the axis or more."""
    axis, panels = FIGURES[name]
    known = [(panel, lines) for panel in panels if len((lines := lines_of(panel)).get("fedavg", {})) > 1]
    if not known:
        return
    with plt.rc_context({"svg.hashsalt": "fedld", "font.size": 9}):
        figure, axes = plt.subplots(
            1, len(known), figsize=(4.6 * len(known), 3.9), layout="constrained", squeeze=False
        )
        for ax, (panel, lines) in zip(axes[0], known, strict=True):
            _panel(ax, panel, lines, falling=name == "alpha")
            ax.set_xlabel(axis)
        axes[0][0].set_ylabel("accuracy of the global model, %")
        _save(figure, folder / f"sensitivity-{name}")


def draw_terms(folder: Path = ROOT / "docs" / "figures", results: Path = ROOT / "results") -> None:
    """Write the figure of the loss terms: local and shift loss add up, aggregation takes back or adds."""
    with plt.rc_context({"svg.hashsalt": "fedld", "font.size": 9}):
        figure, axes = plt.subplots(
            1, len(TERMS), figsize=(4.6 * len(TERMS), 2.9), layout="constrained", squeeze=False
        )
        for ax, (title, study) in zip(axes[0], TERMS.items(), strict=True):
            causes = json.loads((results / study / "table.json").read_text())["causes"]
            _terms(ax, {cause["label"]: cause for cause in causes})
            ax.set_title(title, fontsize=10)
        total, *terms = axes[0][0].get_legend_handles_labels()[0]
        figure.legend(handles=[*terms, total], loc="outside lower center", ncols=4, frameon=False)
        _save(figure, folder / "loss-terms")


def _terms(ax: Axes, causes: Mapping[str, Mapping[str, float]]) -> None:
    drawn = [label for label in COLOURS if label in causes]
    local, shift, aggregation, total = (
        np.array([causes[label][term] for label in drawn])
        for term in ("local", "shift", "aggregation", "total")
    )
    places = np.arange(len(drawn))
    ax.barh(places, local, 0.62, color="#b8c4d6", label="local")
    ax.barh(places, shift, 0.62, left=local, color="#e08a2e", label="+ distribution shift")
    taken = {"hatch": "////", "edgecolor": "#333333", "fill": False, "linewidth": 0.6}
    ax.barh(places, aggregation, 0.3, left=local + shift, label="+ aggregation (taken back)", **taken)
    ax.plot(total, places, "|", color="#111111", ms=15, mew=2.2, label="= global loss")
    ax.set_yticks(places, [NAMES.get(label, label) for label in drawn])
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", alpha=0.25)
    ax.set_xlabel("training loss, last round")


def _save(figure: Figure, path: Path) -> None:
    for suffix, options in ((".png", {"dpi": 200}), (".svg", {"metadata": {"Date": None}})):
        figure.savefig(path.with_suffix(suffix), **options)
    plt.close(figure)


def _panel(ax: Axes, panel: Panel, lines: Lines, falling: bool) -> None:
    drawn = {}
    for label, by_value in lines.items():
        means, low, high = np.array([_interval(seeds) for seeds in by_value.values()]).T
        xs, style = list(by_value), "--" if label == "central" else "-"
        ax.plot(xs, means, style, color=COLOURS[label], marker="o", markersize=3.5, linewidth=1.4)
        ax.fill_between(xs, low, high, color=COLOURS[label], alpha=0.15, linewidth=0)
        drawn[label] = means
    shown = np.concatenate(list(drawn.values()))
    ax.set_ylim(max(shown.min(), shown.max() - panel.depth) - 0.8, shown.max() + 0.8)
    ax.set_xscale("log")
    ticks = sorted({x for by_value in lines.values() for x in by_value})
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    if falling:
        ax.invert_xaxis()
    ax.tick_params(axis="x", labelsize=7)
    ax.minorticks_off()
    ax.set_title(panel.title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    _name(ax, {label: means[0 if falling else -1] for label, means in drawn.items()})


def _interval(seeds: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval."""
    found = paired_difference(seeds, [0.0] * len(seeds))
    return (found.mean, *(found.interval or (found.mean, found.mean)))


def _name(ax: Axes, ends: Mapping[str, float]) -> None:
    """Names at the right end of their lines, pushed apart where they would lie on each other."""
    low, high = ax.get_ylim()
    places = spread({label: (y - low) / (high - low) for label, y in ends.items()}, APART)
    for label, place in places.items():
        ax.annotate(
            NAMES.get(label, label),
            (1.02, place),
            xycoords="axes fraction",
            va="center",
            color=COLOURS[label],
            fontsize=8,
        )


def spread(places: Mapping[str, float], apart: float) -> dict[str, float]:
    """Places from 0 to 1 in the same order, at least so far apart.

    >>> {name: round(place, 2) for name, place in spread({"a": 0.5, "b": 0.5, "c": -3.0}, 0.1).items()}
    {'c': 0.0, 'a': 0.5, 'b': 0.6}
    """
    found: dict[str, float] = {}
    least = 0.0
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        found[name] = max(min(place, 1.0), least)
        least = found[name] + apart
    limit = 1.0
    for name in reversed(found):
        found[name] = min(found[name], limit)
        limit = found[name] - apart
    return found


if __name__ == "__main__":
    for figure_name in FIGURES:
        draw(figure_name)
    draw_terms()
