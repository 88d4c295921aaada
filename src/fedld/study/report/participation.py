"""Who took part in which round: a strip of sites by rounds, shown first where somebody was missing."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from fedld.analysis.participation import Participation
from fedld.records.reader import Run, clean
from fedld.study.report.chart import Chart, settle, short
from fedld.study.report.style import GRID, SERIES, SURFACE, drawing, new_figure

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
