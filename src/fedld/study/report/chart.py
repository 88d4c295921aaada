"""A chart: a drawing, its data and a sentence about it, so that it can be seen, heard and computed with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedld.study.formats import comma_separated
from fedld.study.report.style import DASHES, MUTED, SERIES, drawing, inline_svg, save_figure, variables

Floats = NDArray[np.float64]
DataCell = str | int | float | None
Hover = dict[str, Any]


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend: a button that hides what it names."""

    name: str
    colour: str
    part: str  # class of the drawing's elements


@dataclass(frozen=True)
class Chart:
    """One figure of the report."""

    name: str
    title: str
    note: str  # how to read it
    summary: str  # what a screen reader says instead of the drawing
    figure: Figure
    columns: tuple[str, ...]
    rows: Sequence[tuple[DataCell, ...]]
    hover: list[Hover] = field(default_factory=list)
    legend: list[LegendKey] = field(default_factory=list)
    heat: dict[str, Any] | None = None  # matrices for the round slider
    wide: bool = False

    def inline(self, prefix: str, label: str) -> str:
        """SVG element for a page, whose script draws the cells of a matrix itself, for any round."""
        self._show_mesh(False)
        return inline_svg(self.figure, f"{prefix}-{self.name}", label)

    def save(self, folder: Path) -> None:
        """Files for a paper: SVG and PDF with vector fonts, PNG with 300 dpi, white ground; data as CSV."""
        self._show_mesh(True)
        folder.mkdir(parents=True, exist_ok=True)
        with self._named(), drawing():
            for kind in ("svg", "pdf", "png"):
                save_figure(self.figure, folder / f"{self.name}.{kind}", tight=bool(self.legend))
        text = comma_separated([self.columns, *self.rows])
        (folder / f"{self.name}.csv").write_text(text, encoding="utf-8")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """The page's legend is buttons; a file has its names above the drawing."""
        light = variables(dark=False)
        handles = [
            Patch(color=light.get(key.colour[6:-1], key.colour), label=key.name) for key in self.legend
        ]
        if not handles:
            yield
            return
        made = self.figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
        try:
            yield
        finally:
            made.remove()

    def _show_mesh(self, visible: bool) -> None:
        for mesh in self.figure.findobj(lambda artist: artist.get_gid() == "part-mesh"):
            mesh.set_visible(visible)


@dataclass(frozen=True)
class Look:
    """Colour and dashes of a method, the same in every chart."""

    colour: str
    dashes: Any
    slot: int

    @property
    def css(self) -> str:
        """The colour as a page knows it."""
        return f"var(--s{self.slot})" if self.slot < len(SERIES) else "var(--muted)"

    @property
    def plot(self) -> dict[str, Any]:
        """Arguments for `Axes.plot`."""
        return {"color": self.colour, "linestyle": self.dashes}


OWN_COLOURS = (
    *("fedavg", "fedprox", "fedld", "fedld-measured"),
    *("scaffold", "fedld-drift", "measured", "central"),
)
"""Methods that always have the colour of their place."""


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Eight hues, then grey with dashes: a ninth hue would not be told apart.

    A method has the same colour on every page: that of its place in `OWN_COLOURS`, else one that follows from
    its name, or the next free one where another method of the page has that.
    """
    slots = {label: OWN_COLOURS.index(label) for label in labels if label in OWN_COLOURS}
    for label in sorted(set(labels) - slots.keys()):
        taken = set(slots.values())
        wanted = crc32(label.encode()) % len(SERIES)
        hues = [(wanted + k) % len(SERIES) for k in range(len(SERIES))]
        free = (slot for slot in [*hues, *range(len(SERIES), len(SERIES) + len(labels))] if slot not in taken)
        slots[label] = next(free)
    return {label: _look(slots[label]) for label in labels}


def _look(slot: int) -> Look:
    if slot < len(SERIES):
        return Look(SERIES[slot], DASHES[0], slot)
    return Look(MUTED, DASHES[slot % len(DASHES)], slot)


@dataclass(frozen=True)
class Band:
    """Mean over seeds and a band around it, by round."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


def band(series: Sequence[Mapping[int, float]]) -> Band | None:
    """Mean and range over seeds, at the rounds where every seed has a value."""
    finite = [{r: v for r, v in one.items() if np.isfinite(v)} for one in series]
    finite = [one for one in finite if one]
    rounds = sorted(set.intersection(*(set(one) for one in finite))) if finite else []
    if not rounds:
        return None
    values = np.array([[one[r] for r in rounds] for one in finite])
    return Band(np.array(rounds, dtype=float), values.mean(0), values.min(0), values.max(0))


def legend(labels: Iterable[str], styles: Mapping[str, Look]) -> list[LegendKey]:
    """Keys of the methods in a chart; a single one needs none."""
    keys = [LegendKey(label, styles[label].css, f"part-series-{styles[label].slot}") for label in labels]
    return keys if len(keys) > 1 else []


def draw_bands(ax: Axes, bands: Mapping[str, Band], styles: Mapping[str, Look]) -> None:
    """One line a method with the range over seeds behind it; a single round is a dot."""
    for label, b in bands.items():
        look = styles[label]
        marker = "o" if len(b.x) < 3 else ""
        (line,) = ax.plot(b.x, b.mean, label=label, marker=marker, **look.plot)
        line.set_gid(f"part-series-{look.slot}")
        if (b.high > b.low).any():
            area = ax.fill_between(b.x, b.low, b.high, color=look.colour, alpha=0.16, linewidth=0)
            area.set_gid(f"part-series-{look.slot}")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.grid(axis="x", visible=False)
    ax.margins(x=0.02)


def hover_of(ax: Axes, series: Mapping[str, tuple[Floats, Floats]], colours: Mapping[str, str]) -> Hover:
    """What a pointer over these axes shows; the figure must have its final layout."""
    return {
        "box": frame_of(ax),
        "xlim": [round(float(v), 4) for v in ax.get_xlim()],
        "series": [
            {"name": name, "colour": colours[name], "x": x.tolist(), "y": [significant(v) for v in y]}
            for name, (x, y) in series.items()
        ],
    }


def frame_of(ax: Axes) -> list[float]:
    """Left, top, right and bottom of the axes in the drawing."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    box, (width, height) = ax.get_position(), figure.get_size_inches() * 72
    edges = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    return [round(float(edge), 2) for edge in edges]


def significant(value: float, digits: int = 4) -> float | None:
    """A number short enough for a page; None where it is not finite."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None


def settle(figure: Figure) -> None:
    """Compute the layout now and keep it, so that positions can be read."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")


def short(name: str, length: int = 22) -> str:
    """A name that fits on an axis."""
    return name if len(name) <= length else name[: length - 1] + "…"
