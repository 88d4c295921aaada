"""Segmentation case by case: outlines on pictures of every site, and means over each site's own cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fedld.analysis.intervals import Estimate
from fedld.analysis.sites import CaseResult
from fedld.data.npz import Header, read_arrays
from fedld.errors import FedLDError
from fedld.records.reader import Run, by_label, clean, longest_run
from fedld.records.schema import CASES
from fedld.study.report.chart import (
    SURFACE,
    Chart,
    DataCell,
    Look,
    drawing,
    legend,
    new_figure,
    settle,
    short,
)
from fedld.study.report.tables import PageTable, TableCell
from fedld.study.sites import case_means

TRUE, PREDICTED = "#00d5ff", "#ffd000"
"""Colours of outlines that are seen on X-rays and on photographs of eyes."""
STYLES: tuple[Any, ...] = ("-", (0, (3, 1.2)), (0, (1, 1)))
RANKS = ("best", "median", "worst")
COLUMNS = 2
"""Sites beside each other."""
MOST_SITES = 24
SIDE, GAP, LABEL = 132, 10, 44
"""Pixels: of a picture, between pictures, and above them for a site's name."""
MEASURES = {"dice": "Dice", "iou": "IoU", "hausdorff": "95 % Hausdorff distance (px)"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Cases:
    """cases.npz of a run, read: one entry for each case."""

    pictures: NDArray[np.uint8]
    truth: NDArray[np.uint8]
    predicted: NDArray[np.uint8]
    site: list[str]
    name: list[str]
    rank: list[str]
    dice: NDArray[np.float64]
    outputs: list[str]  # names of the classes, the background first


def read_cases(run: Run) -> Cases | None:
    """Read the cases that a run kept; None where there are none.

    Raises:
        FedLDError: the file is damaged or was changed.
    """
    file = run.path / CASES
    if not file.is_file():
        return None
    if changed := run.change(CASES):
        raise FedLDError(changed)

    def wanted(name: str, header: Header) -> bool:
        return name in (*Cases.__dataclass_fields__, "classes")

    arrays = read_arrays(file, wanted)
    try:
        texts = {key: [clean(text) for text in arrays[key]] for key in ("site", "name", "rank")}
        outputs = [clean(text) for text in arrays["classes"]]
        masks = {key: arrays[key].astype(np.uint8) for key in ("pictures", "truth", "predicted")}
        cases = Cases(**masks, **texts, outputs=outputs, dice=arrays["dice"].astype(np.float64))  # type: ignore[arg-type]
        sizes = {len(cases.pictures), len(cases.site), len(cases.name), len(cases.rank), len(cases.dice)}
        if len(sizes) > 1 or not cases.pictures.shape[:3] == cases.truth.shape == cases.predicted.shape:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise FedLDError(f"{CASES} is damaged") from None
    return cases


def overlay_chart(name: str, label: str, runs: Sequence[Run]) -> Chart | None:
    """Draw the best, the median and the worst case of every site with true and predicted outlines.

    Args:
        name: of the chart, for its file.
        label: the method of the final global model in the drawing.
        runs: of all methods; the first seed of that method is taken.

    Returns:
        The chart; None where the method has no global model or kept no cases.
    """
    method_runs = sorted((run for run in runs if run.label == label), key=lambda run: run.seed)
    run = next((run for run in method_runs if (run.path / CASES).is_file()), None)
    cases = read_cases(run) if run is not None else None
    if run is None or cases is None or not len(cases.pictures):
        return None
    sites = list(dict.fromkeys(cases.site))[:MOST_SITES]
    means = {name: models.get("global") for name, models in case_means(run.summary).items()}
    with drawing():
        figure = _sheet(cases, sites, means)
    rows = [
        (cases.site[k] or "test set", cases.rank[k], cases.name[k], float(cases.dice[k]))
        for k in range(len(cases.dice))
        if cases.site[k] in sites
    ]
    summary = "; ".join(f"{site}, {rank}: Dice {dice:.3f}" for site, rank, _, dice in rows)
    return Chart(
        name=name,
        title=f"Best, median and worst case of every site: {label}",
        note="Outlines on test pictures: the true one in blue, that of the global model in yellow; "
        f"{run.repetition}. Cases are ranked by Dice, the mean over classes.",
        summary=f"Test pictures with true and predicted outlines. {summary}.",
        figure=figure,
        columns=("site", "rank", "picture", "dice"),
        rows=rows,
        wide=True,
    )


def _sheet(cases: Cases, sites: Sequence[str], means: Mapping[str, CaseResult | None]) -> Figure:
    """Lay out a strip of up to three pictures for every site, two sites beside each other."""
    across = min(COLUMNS, len(sites))
    down = -(-len(sites) // across)
    strip = len(RANKS) * (SIDE + GAP) + GAP
    top = 30
    width, height = across * strip, top + down * (SIDE + LABEL + 22)
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    for place, site in enumerate(sites):
        left = (place % across) * strip
        upper = top + (place // across) * (SIDE + LABEL + 22)
        name = clean(site) or "test set"
        figure.text(
            (left + 4) / width, 1 - (upper + 16) / height, short(name, 26), weight="bold", fontsize=11
        )
        text = _mean_text(means.get(site))
        figure.text((left + 4) / width, 1 - (upper + 32) / height, text, fontsize=9.5)
        for k in (k for k in range(len(cases.site)) if cases.site[k] == site and cases.rank[k] in RANKS):
            x = left + 4 + RANKS.index(cases.rank[k]) * (SIDE + GAP)
            box = (x / width, 1 - (upper + LABEL + SIDE) / height, SIDE / width, SIDE / height)
            axes = figure.add_axes(box)
            _draw_case(axes, cases, k)
            caption = f"{cases.rank[k]}: Dice {cases.dice[k]:.3f}"
            figure.text(x / width, 1 - (upper + LABEL + SIDE + 14) / height, caption, fontsize=9.5)
    figure.legend(
        handles=_keys(cases.outputs),
        loc="upper left",
        ncols=6,
        fontsize=9.5,
        borderaxespad=0.2,
        handlelength=2.4,
    )
    return figure


def _mean_text(means: CaseResult | None) -> str:
    if means is None or "dice" not in means.measures:
        return ""
    of = f"{means.pictures} picture{'s' if means.pictures != 1 else ''}"
    return f"{of}, mean Dice {means.measures['dice']}"


def _draw_case(axes: Axes, cases: Cases, k: int) -> None:
    """Draw one picture with the outlines of every class but the background."""
    picture = cases.pictures[k]
    axes.imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=255)
    for colour, width, mask in ((TRUE, 1.6, cases.truth[k]), (PREDICTED, 1.1, cases.predicted[k])):
        for number in range(1, len(cases.outputs)):
            inside = np.pad(mask == number, 1).astype(float)
            if inside.any():
                at_x, at_y = np.arange(-1, mask.shape[1] + 1), np.arange(-1, mask.shape[0] + 1)
                style = STYLES[(number - 1) % len(STYLES)]
                axes.contour(at_x, at_y, inside, [0.5], colors=colour, linewidths=width, linestyles=[style])
    axes.set(xlim=(-0.5, picture.shape[1] - 0.5), ylim=(picture.shape[0] - 0.5, -0.5))
    axes.set_axis_off()


def _keys(classes: Sequence[str]) -> list[Line2D]:
    """Make entries of the legend: colours, and styles of lines where there are several classes."""
    lines = [Line2D([], [], color=TRUE, label="true"), Line2D([], [], color=PREDICTED, label="predicted")]
    if len(classes) > 2:
        lines += [
            Line2D(
                [], [], color="#52514e", linestyle=STYLES[k % len(STYLES)], linewidth=1.4, label=short(name)
            )
            for k, name in enumerate(classes[1:])
        ]
    return lines


def case_means_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw the mean Dice over each site's own test cases with its interval, for every method."""
    means_by_method = _by_method(runs)
    sites = list(dict.fromkeys(site for means in means_by_method.values() for site, _, _ in means))[
        :MOST_SITES
    ]
    if not sites:
        return None
    rows: list[tuple[DataCell, ...]] = []
    with drawing():
        figure = new_figure(560, 90 + (18 + 11 * len(means_by_method)) * len(sites))
        axes = figure.add_subplot()
        for slot, (label, means) in enumerate(means_by_method.items()):
            chosen = _one_model(means)
            for site, (which, result) in chosen.items():
                estimate = result.measures.get("dice", Estimate(None))
                if site not in sites or estimate.value is None:
                    continue
                y = sites.index(site) + 0.7 * ((slot + 0.5) / len(means_by_method) - 0.5)
                _whisker(axes, estimate, estimate.value, y, look=styles[label])
                rows.append((label, site, which, estimate.value, estimate.low, estimate.high))
        axes.set_yticks(range(len(sites)), [short(site) for site in sites])
        axes.set_ylim(len(sites) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("Dice, mean over a site's own test pictures and 95 % interval")
        settle(figure)
    return Chart(
        name="case-means",
        title="Dice at every site",
        note="One seed of each method; a method with personal models is shown with those. Intervals are "
        "Student's "
        "over pictures, or over patients where they are known.",
        summary="; ".join(f"{label} at {site}: {value:.3f}" for label, site, _, value, *_ in rows),
        figure=figure,
        columns=("method", "site", "model", "dice", "low", "high"),
        rows=rows,
        legend=legend(means_by_method, styles),
    )


def _whisker(axes: Axes, estimate: Estimate, value: float, y: float, look: Look) -> None:
    part = f"part-series-{look.slot}"
    if estimate.low is not None and estimate.high is not None:
        (line,) = axes.plot((estimate.low, estimate.high), (y, y), color=look.colour, linewidth=2, alpha=0.5)
        line.set_gid(part)
    (dot,) = axes.plot(
        [value],
        [y],
        "o",
        color=look.colour,
        markersize=6,
        markeredgecolor=SURFACE,
        markeredgewidth=1,
    )
    dot.set_gid(part)


def case_means_table(runs: Sequence[Run]) -> PageTable | None:
    """Tabulate Dice, IoU and Hausdorff distance at every site with intervals; None if no case was judged."""
    rows = []
    for label, means in _by_method(runs).items():
        seed = str(longest_run([run for run in runs if run.label == label]).seed)
        for site, which, result in means:
            cells = [result.measures.get(name, Estimate(None)) for name in MEASURES]
            words = (label, seed, site, which)
            count = TableCell(str(result.pictures), result.pictures)
            numbers = [TableCell(str(cell), cell.value) for cell in cells]
            rows.append([*(TableCell(word, word) for word in words), count, *numbers])
    if not rows:
        return None
    columns = ["method", "seed", "site", "model", "pictures", *MEASURES.values()]
    note = (
        "Means over a site's own test pictures after the last round, with 95 % intervals (Student's; over "
        "patients where they are known). A class that is in neither mask counts as Dice 1."
    )
    return PageTable(
        name="case-means", title="Every site's own test pictures", note=note, columns=columns, rows=rows
    )


MethodMeans = list[tuple[str, Any, CaseResult]]


def _by_method(runs: Sequence[Run]) -> dict[str, MethodMeans]:
    """Collect site, model and means of the longest run of every method that judged cases."""
    means_by_method: dict[str, MethodMeans] = {}
    for label, method_runs in by_label(runs).items():
        by_site = case_means(longest_run(method_runs).summary)
        means = [
            (clean(site), which, result)
            for site, models in by_site.items()
            for which, result in models.items()
        ]
        if means:
            means_by_method[label] = means
    return means_by_method


def _one_model(means: MethodMeans) -> dict[str, tuple[str, CaseResult]]:
    """Choose the model that a site would use: its personal one where there is one."""
    return {site: (which, result) for site, which, result in sorted(means, key=lambda m: m[1] == "personal")}
