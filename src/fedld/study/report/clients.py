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
    """Read the samples of every class at every client that took part."""
    counts_by_client = {line["index"]: line.get("label_counts") for line in run.clients.lines}
    return {
        i: counts for i, counts in sorted(counts_by_client.items()) if isinstance(counts, list) and counts
    }


def labels_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw the class counts of every client, from the first run."""
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
        name="labels",
        title="Labels of every client",
        note=f"Training samples by class, seed {run.seed}.",
        summary=f"Training samples of every client: {sizes}.",
        figure=figure,
        columns=("client", *classes),
        rows=[(name, *(int(x) for x in row)) for name, row in zip(names, matrix, strict=True)],
    )


def class_names(run: Run, count: int) -> list[str]:
    """Read class names from the predictions; numbers where there are none."""
    names = run.predictions.get("classes") if run.predictions else None
    if names is None and run.task != "classification":
        names = (read_object(run.path / "federation.json") or {}).get("classes")
    if isinstance(names, list) and len(names) == count:
        return [clean(name) for name in names]
    return [f"class {k}" for k in range(count)]


def _rows(count: int) -> tuple[Figure, int]:
    """Make a figure with a row per client, and the step between named rows so that names do not touch."""
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
    """Average the worst, mean and best client and the gap over seeds, on their own test sets, scaled."""
    spread_by_method: dict[str, dict[str, float]] = {}
    measure = next(iter(measures_of(runs).values()), None)
    if measure is None:
        return spread_by_method
    for label, method_runs in by_label(runs).items():
        values = [list(client_scores(run, measure).values()) for run in method_runs]
        values = [v for v in values if v]
        if values:
            best = float(np.mean([measure.best(v) for v in values]))
            worst = float(np.mean([measure.worst_of(v) for v in values]))
            mean = float(np.mean([np.mean(v) for v in values]))
            spread_by_method[label] = {"worst": worst, "mean": mean, "best": best, "gap": abs(best - worst)}
    return spread_by_method


def fairness_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """Draw the first measure at every client under every method: one dot per client, mean over seeds."""
    rows: list[tuple[DataCell, ...]] = []
    measure = next(iter(measures_of(runs).values()))
    grouped = by_label(runs)
    tested = any(client_scores(run, measure) for run in runs)
    where = "own test set" if tested else "own training data"
    values_by_method: dict[str, dict[str, float]] = {}
    for label, method_runs in grouped.items():
        seeds = [
            client_scores(run, measure) if tested else training_scores(run, measure) for run in method_runs
        ]
        names = dict.fromkeys(name for values in seeds for name in values)
        values_by_method[label] = {n: float(np.mean([v[n] for v in seeds if n in v])) for n in names}
        rows += [(label, name, value) for name, value in values_by_method[label].items()]
    values_by_method = {label: values for label, values in values_by_method.items() if values}
    if not values_by_method:
        return None
    with drawing():
        figure = new_figure(560, 100 + 42 * len(values_by_method))
        ax = figure.add_subplot()
        for y, (label, values) in enumerate(values_by_method.items()):
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
        ax.set_yticks(range(len(values_by_method)), [short(label) for label in values_by_method])
        ax.set_ylim(len(values_by_method) - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.08)
        unit = f" ({measure.unit})" if measure.unit else ""
        ax.set_xlabel(f"{measure.title} at every client, {where}{unit}")
        settle(figure)
    return Chart(
        name="clients",
        title=f"{_capital(measure.title)} of every client",
        note=f"The global model on each client's {where}; one dot per client, the worst one named.",
        summary="; ".join(
            f"{k}: worst client {measure.format(measure.worst_of(list(v.values())))}, best "
            f"{measure.format(measure.best(list(v.values())))}"
            for k, v in values_by_method.items()
        ),
        figure=figure,
        columns=("method", "client", measure.name),
        rows=rows,
    )


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


NOT_ASKED, PRESENT, MISSING = range(3)
STATES = ("not asked", "took part", "missing")
COLOURS = (GRID, SERIES[0], SERIES[5])
SHOWN = 40  # clients; those that were ever missing come first


def participation_chart(runs: Sequence[Run]) -> Chart | None:
    """Draw the run with most absences, site by round; None if all sites took part in all rounds."""
    runs_with_absences = [(run, Participation(run.clients.lines)) for run in runs if run.clients.lines]
    runs_with_absences = [(run, part) for run, part in runs_with_absences if part.missing]
    if not runs_with_absences:
        return None
    run, part = max(runs_with_absences, key=lambda absence: len(absence[1].missing))
    gone = [absence.client for absence in part.absences]
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
    sentences = " ".join(clean(absence.sentence()) for absence in part.absences[:3])
    others = len(runs_with_absences) - 1
    return Chart(
        name="participation",
        title="Absent sites",
        note=sentences
        + (f" {run.label}, seed {run.seed}; {others} more run(s) had absences." if others else ""),
        summary=f"Participation, site by round. {sentences}",
        figure=figure,
        columns=("client", "round", "state", "reason"),
        rows=[
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
    return PRESENT if (name, round_) in part.sampled else NOT_ASKED
