"""Charts of the clients: what they hold, how well the global model serves them, when they took part."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedld.analysis.sites import Participation
from fedld.records.reader import Run, by_label, clean, longest_run, read_object
from fedld.study.measures import client_scores, measures_of, training_scores
from fedld.study.report.chart import (
    GRID,
    SECOND,
    SEQUENTIAL,
    SERIES,
    SURFACE,
    Chart,
    DataCell,
    Floats,
    Look,
    drawing,
    new_figure,
    settle,
    short,
)


def label_counts(run: Run) -> dict[int, list[int]]:
    """Samples of every class at every client that took part."""
    found = {line["index"]: line.get("label_counts") for line in run.clients.lines}
    return {i: counts for i, counts in sorted(found.items()) if isinstance(counts, list) and counts}


def labels_chart(runs: Sequence[Run]) -> Chart | None:
    """Class counts of every client, from the first run."""
    run = longest_run(runs)
    counts = label_counts(run)
    if not counts or len({len(c) for c in counts.values()}) > 1:
        return None
    matrix = np.array(list(counts.values()), dtype=float)
    names = [run.client_names[i] for i in counts]
    classes = class_names(run, matrix.shape[1])
    draw = _bars if len(classes) <= len(SERIES) else _cells
    with drawing():
        figure = draw(matrix, names, classes)
        settle(figure)
    sizes = ", ".join(f"{name}: {int(row.sum())}" for name, row in zip(names, matrix, strict=True))
    return Chart(
        "labels",
        "Labels of every client",
        f"Training samples by class, seed {run.seed}.",
        f"Training samples of every client: {sizes}.",
        figure,
        ("client", *classes),
        [(name, *(int(x) for x in row)) for name, row in zip(names, matrix, strict=True)],
    )


def class_names(run: Run, count: int) -> list[str]:
    """Names from the predictions, or numbers."""
    known = run.predictions.get("classes") if run.predictions else None
    if known is None and run.task != "classification":
        known = (read_object(run.path / "federation.json") or {}).get("classes")
    if isinstance(known, list) and len(known) == count:
        return [clean(name) for name in known]
    return [f"class {k}" for k in range(count)]


def _rows(count: int) -> tuple[Figure, int]:
    """A figure with a row per client, and which rows are named so that names do not touch."""
    height = max(4.0, min(24.0, 480 / count))
    return new_figure(560, 100 + max(110, height * count)), max(1, round(11 / height))


def _bars(matrix: Floats, names: list[str], classes: list[str]) -> Figure:
    figure, every = _rows(len(names))
    ax = figure.add_subplot()
    left = np.zeros(len(names))
    for k, name in enumerate(classes):
        bars = ax.barh(range(len(names)), matrix[:, k], left=left, label=short(name), height=0.7)
        for bar in bars:
            bar.set(facecolor=SERIES[k], edgecolor=SURFACE, linewidth=1.5)
        left += matrix[:, k]
    ax.set_yticks(range(0, len(names), every), [short(n) for n in names[::every]], fontsize=9.5)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("training samples")
    figure.legend(loc="outside upper left", ncols=4)
    return figure


def _cells(matrix: Floats, names: list[str], classes: list[str]) -> Figure:
    figure, every = _rows(len(names))
    ax = figure.add_subplot()
    mesh = ax.pcolormesh(matrix, cmap=SEQUENTIAL, edgecolor=SURFACE, linewidth=0.4, vmin=0)
    rotation = 0 if max(map(len, classes)) < 4 else 90
    ax.set_xticks(np.arange(len(classes)) + 0.5, [short(c, 16) for c in classes], rotation=rotation)
    ax.set_yticks(np.arange(0, len(names), every) + 0.5, [short(n) for n in names[::every]], fontsize=9.5)
    ax.invert_yaxis()
    ax.grid(False)
    ax.tick_params(length=0)
    bar = figure.colorbar(mesh, ax=ax, fraction=0.05, pad=0.03)
    bar.set_label("training samples", color=SECOND)
    return figure


def fairness(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Mean over seeds of the worst, mean and best client and the gap, on their own test sets, as shown."""
    found: dict[str, dict[str, float]] = {}
    measure = next(iter(measures_of(runs).values()), None)
    if measure is None:
        return found
    for label, own in by_label(runs).items():
        values = [list(client_scores(run, measure).values()) for run in own]
        values = [v for v in values if v]
        if values:
            best = float(np.mean([measure.best(v) for v in values]))
            worst = float(np.mean([measure.worst_of(v) for v in values]))
            mean = float(np.mean([np.mean(v) for v in values]))
            found[label] = {"worst": worst, "mean": mean, "best": best, "gap": abs(best - worst)}
    return found


def fairness_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """The first measure at every client under every method: one dot per client, mean over seeds."""
    rows: list[tuple[DataCell, ...]] = []
    measure = next(iter(measures_of(runs).values()))
    grouped = by_label(runs)
    tested = any(client_scores(run, measure) for run in runs)
    where = "own test set" if tested else "own training data"
    found: dict[str, dict[str, float]] = {}
    for label, own in grouped.items():
        seeds = [client_scores(run, measure) if tested else training_scores(run, measure) for run in own]
        names = dict.fromkeys(name for values in seeds for name in values)
        found[label] = {n: float(np.mean([v[n] for v in seeds if n in v])) for n in names}
        rows += [(label, name, value) for name, value in found[label].items()]
    found = {label: values for label, values in found.items() if values}
    if not found:
        return None
    with drawing():
        figure = new_figure(560, 100 + 42 * len(found))
        ax = figure.add_subplot()
        for y, (label, values) in enumerate(found.items()):
            x = np.array(list(values.values()))
            ax.plot((x.min(), x.max()), (y, y), color=styles[label].colour, linewidth=2, alpha=0.4)
            ax.plot(
                x, np.full(len(x), y), "o", color=styles[label].colour, markersize=8,
                markeredgecolor=SURFACE, markeredgewidth=1.5,
            )  # fmt: skip
            worst = (min if measure.better == "more" else max)(values, key=lambda n: values[n])
            ax.annotate(
                short(worst, 18),
                (values[worst], y),
                (0, 9),
                textcoords="offset points",
                fontsize=9,
                ha="center",
            )
        ax.set_yticks(range(len(found)), [short(label) for label in found])
        ax.set_ylim(len(found) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.08)
        unit = f" ({measure.unit})" if measure.unit else ""
        ax.set_xlabel(f"{measure.title} at every client, {where}{unit}")
        settle(figure)
    return Chart(
        "clients",
        f"{_capital(measure.title)} of every client",
        f"The global model on each client's {where}; one dot per client, the worst one named.",
        "; ".join(
            f"{k}: worst client {measure.format(measure.worst_of(list(v.values())))}, best "
            f"{measure.format(measure.best(list(v.values())))}"
            for k, v in found.items()
        ),
        figure,
        ("method", "client", measure.name),
        rows,
    )


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


NOT_ASKED, PRESENT, MISSING = range(3)
STATES = ("not asked", "took part", "missing")
COLOURS = (GRID, SERIES[0], SERIES[5])
SHOWN = 40  # clients; those that were ever missing come first


def participation_chart(runs: Sequence[Run]) -> Chart | None:
    """The run with most absences, site by round; None if everybody was there in all of them."""
    found = [(run, Participation(run.clients.lines)) for run in runs if run.clients.lines]
    found = [(run, part) for run, part in found if part.missing]
    if not found:
        return None
    run, part = max(found, key=lambda one: len(one[1].missing))
    gone = [one.client for one in part.absences]
    names = [*gone, *(name for name in part.clients if name not in gone)][:SHOWN]
    grid = np.array([[_state(part, name, r) for r in part.rounds] for name in names])
    with drawing():
        figure = new_figure(1140, 84 + 18 * len(names))
        ax = figure.add_subplot()
        edges = np.array([*part.rounds, part.rounds[-1] + 1]) - 0.5
        ax.pcolormesh(
            edges,
            np.arange(len(names) + 1),
            grid,
            cmap=ListedColormap(COLOURS),
            vmin=-0.5,
            vmax=2.5,
            edgecolor=SURFACE,
            linewidth=1,
        )
        ax.set_yticks(np.arange(len(names)) + 0.5, [short(clean(name)) for name in names], fontsize=9.5)
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        ax.invert_yaxis()
        ax.grid(False)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_xlabel("round")
        handles = [
            Patch(color=c, label=n) for c, n in zip(COLOURS[1:], ("took part", "missing"), strict=True)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=3)
        settle(figure)
    told = " ".join(clean(one.sentence()) for one in part.absences[:3])
    others = len(found) - 1
    return Chart(
        "participation",
        "Not everybody took part",
        told + (f" {run.label}, seed {run.seed}; {others} more run(s) had absences." if others else ""),
        f"Participation, site by round. {told}",
        figure,
        ("client", "round", "state", "reason"),
        [
            (
                name,
                r,
                ("not asked", "took part", "missing")[_state(part, name, r)],
                part.missing.get((name, r)),
            )
            for name in names
            for r in part.rounds
        ],
        wide=True,
    )


def _state(part: Participation, name: str, round_: int) -> int:
    if (name, round_) in part.missing:
        return MISSING
    return PRESENT if (name, round_) in part.asked else NOT_ASKED
