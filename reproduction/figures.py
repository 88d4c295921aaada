"""Draw the figures of the documentation from the tidy file.

`python -m reproduction figures` writes to docs/figures (.png and .svg): sensitivity-rate and
sensitivity-alpha, the mean accuracy over seeds with its 95 % t interval against the learning rate or
Dirichlet's alpha; loss-terms and
loss-terms-tasks, what the global loss of the last round consists of (Eq. 2).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np

from fedld.analysis.statistics import mean_interval
from fedld.study.reasons import Account
from reproduction.evidence import FOLDER, load_study
from reproduction.pages import comparisons

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = FOLDER.parent / "docs" / "figures"
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
    """One federation: its title and its studies, a pattern with a group for the value on the axis."""

    title: str
    studies: str
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
TASK_TERMS = {
    "chest X-rays, classes": "covid-head-shared",
    "heart disease, classes": "heart4-all",
    "heart disease, three labels": "heart4-multilabel",
    "heart rate, regression": "heart4-regression",
    "breast cancer, survival": "tcga-brca-tuned",
    "lungs, segmentation": "lungs-countries",
}
"""The same for one study of every task."""
PER_ROW = 3  # panels beside each other

Lines = dict[str, dict[float, list[float]]]
"""Method, value on the axis: final accuracy of every seed."""


def lines_of(panel: Panel) -> Lines:
    """Return final accuracies of the methods that are drawn."""
    lines: Lines = {}
    for name in comparisons():
        if match := re.fullmatch(panel.studies, name):
            for standing in load_study(name).comparison.standings:
                if standing.label in COLOURS and "accuracy" in standing.values:
                    by_value = lines.setdefault(standing.label, {})
                    by_value[float(match[1])] = list(standing.values["accuracy"].values())
    return {label: dict(sorted(lines[label].items())) for label in COLOURS if label in lines}


def draw(name: str, folder: Path = PICTURES) -> None:
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


def draw_terms(name: str = "loss-terms", panels: Mapping[str, str] = TERMS, folder: Path = PICTURES) -> None:
    """Write a figure of the loss terms: local and shift loss add up, aggregation takes back or adds.

    Args:
        name: of the file.
        panels: titles and studies.
        folder: where the file is written.
    """
    across = min(PER_ROW, len(panels))
    down = -(-len(panels) // across)
    with plt.rc_context({"svg.hashsalt": "fedld", "font.size": 9}):
        figure, axes = plt.subplots(
            down, across, figsize=(4.6 * across, 2.9 * down), layout="constrained", squeeze=False
        )
        for ax, (title, study) in zip(axes.flat, panels.items(), strict=False):
            standings = load_study(study).comparison.standings
            _terms(ax, {standing.label: standing.account for standing in standings})
            ax.set_title(title, fontsize=10)
        for ax in axes.flat[len(panels) :]:
            ax.set_axis_off()
        total, *terms = axes[0][0].get_legend_handles_labels()[0]
        figure.legend(handles=[*terms, total], loc="outside lower center", ncols=4, frameon=False)
        _save(figure, folder / name)


def _terms(ax: Axes, accounts: Mapping[str, Account]) -> None:
    drawn = [label for label in COLOURS if label in accounts and accounts[label].total is not None]
    local, shift, aggregation, total = (
        np.array([getattr(accounts[label], term) for label in drawn])
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
    mean = fmean(seeds)
    return (mean, *(mean_interval(seeds) or (mean, mean)))


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
    moved: dict[str, float] = {}
    least = 0.0
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        moved[name] = max(min(place, 1.0), least)
        least = moved[name] + apart
    limit = 1.0
    for name in reversed(moved):
        moved[name] = min(moved[name], limit)
        limit = moved[name] - apart
    return moved


def draw_all() -> None:
    """Draw every figure."""
    for name in FIGURES:
        draw(name)
    draw_terms()
    draw_terms("loss-terms-tasks", TASK_TERMS)
