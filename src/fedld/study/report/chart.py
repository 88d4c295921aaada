"""A chart: a drawing, its data and a sentence about it, and how drawings look.

Figures are drawn once, in light colours. Inside a page every colour becomes a CSS variable, so the same
drawing is right in both modes; written to a file it keeps its light colours.
"""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedld.study.formats import comma_separated

STEPS = 33
INK, SECOND, MUTED, GRID, AXIS, SURFACE = "#0b0b0b", "#52514e", "#898781", "#e1e0d9", "#c3c2b7", "#fcfcfb"
SERIES = ("#2a78d6", "#1baf7a", "#eda100", "#008300", "#4a3aa7", "#e34948", "#e87ba4", "#eb6834")
DARK_SERIES = ("#3987e5", "#199e70", "#c98500", "#30a030", "#9085e9", "#e66767", "#d55181", "#d95926")
TERM_COLOURS = {"local": AXIS, "shift": SERIES[7], "aggregation": SERIES[4]}
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))

_BLUES = ("#dce9fb", "#9ec5f4", "#3f86dd", "#1c5cab", "#0d366b")
_BLUES_DARK = ("#15283f", "#184f95", "#3a87e4", "#86b6ef", "#d9e8fc")
_POLES = ("#9c2323", "#e5706d", "#efeeeb", "#6da2e3", "#184f96")
_POLES_DARK = ("#f08d8b", "#a83f3e", "#343432", "#2f66ab", "#7cb0f0")


def _ramp(colours: tuple[str, ...]) -> list[str]:
    smooth = LinearSegmentedColormap.from_list("ramp", list(colours))
    return [to_hex(smooth(i / (STEPS - 1))) for i in range(STEPS)]


SEQUENTIAL, DIVERGING = ListedColormap(_ramp(_BLUES)), ListedColormap(_ramp(_POLES))


def variables(dark: bool) -> dict[str, str]:
    """Give the CSS variables of a mode."""
    fixed = {
        "ink": ("#0b0b0b", "#ffffff"),
        "second": ("#52514e", "#c3c2b7"),
        "muted": ("#898781", "#898781"),
        "grid": ("#e1e0d9", "#2c2c2a"),
        "axis": ("#c3c2b7", "#5a5955"),
        "surface": ("#fcfcfb", "#1a1a19"),
    }
    colours = {name: pair[dark] for name, pair in fixed.items()}
    colours |= {f"s{i}": c for i, c in enumerate(DARK_SERIES if dark else SERIES)}
    for letter, ramp in (("q", _BLUES_DARK if dark else _BLUES), ("d", _POLES_DARK if dark else _POLES)):
        colours |= {f"{letter}{i}": colour for i, colour in enumerate(_ramp(ramp))}
    return colours


_NAMES = {colour: f"var(--{name})" for name, colour in reversed(variables(dark=False).items())}


def css_variables() -> str:
    """Write the colours of both modes: dark by the reader's system or the page's switch, light on paper."""
    light, dark = (";".join(f"--{k}:{v}" for k, v in variables(mode).items()) for mode in (False, True))
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib's options for a figure."""
    settings: dict[Any, Any] = {
        "font.family": ["DejaVu Sans"],
        "font.size": 11,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": AXIS,
        "axes.labelcolor": SECOND,
        "axes.titlecolor": INK,
        "text.color": INK,
        "text.parse_math": False,
        "xtick.color": AXIS,
        "ytick.color": AXIS,
        "xtick.labelcolor": SECOND,
        "ytick.labelcolor": SECOND,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 1,
        "lines.linewidth": 2,
        "lines.solid_capstyle": "round",
        "axes.facecolor": "none",
        "figure.facecolor": SURFACE,
        "legend.frameon": False,
        "legend.labelcolor": SECOND,
        "svg.fonttype": "none",
        "svg.hashsalt": "fedld",
        "figure.constrained_layout.use": True,
    }
    with mpl.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def new_figure(width: float = 640, height: float = 320) -> Figure:
    """Make a figure measured in the page's pixels."""
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def svg_text(figure: Figure, name: str) -> str:
    """Write the figure as a standalone SVG file."""
    buffer = io.StringIO()
    with drawing(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path, *, tight: bool = False) -> None:
    """Save a figure for a paper, the same bytes for the same drawing; `tight` includes an outer legend."""
    options: dict[str, Any] = {"facecolor": "white", "dpi": 300} | ({"bbox_inches": "tight"} if tight else {})
    metadata = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with mpl.rc_context({"svg.fonttype": "path", "pdf.fonttype": 42, "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata=metadata, **options)


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Write the figure as an element of a page: colours as CSS variables, unique ids, a label to be read.

    `label` must be escaped already.
    """
    text = svg_text(figure, name)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="(part-[a-z0-9-]+)">', r'<g class="\1">', text)
    text = re.sub(r'<g id="[A-Za-z0-9_.]+_\d+">', "<g>", text)
    text = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda match: _NAMES.get(match[0], match[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    box = re.search(r'viewBox="([^"]+)"', text)
    size = box[1] if box else ""
    return re.sub(r"<svg[^>]*>", f'<svg viewBox="{size}" role="img" aria-label="{label}">', text, count=1)


Floats = NDArray[np.float64]
DataCell = str | int | float | None
Hover = dict[str, Any]


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend: a button that hides what it names."""

    name: str
    colour: str
    part: str  # class of the drawing's elements


@dataclass(frozen=True, kw_only=True)
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
        """Write an SVG element for a page; the page's script draws the cells of a matrix, for any round."""
        self._show_mesh(False)
        return inline_svg(self.figure, f"{prefix}-{self.name}", label)

    def save(self, folder: Path) -> None:
        """Save SVG and PDF with vector fonts, PNG with 300 dpi, white ground; data as CSV."""
        self._show_mesh(True)
        folder.mkdir(parents=True, exist_ok=True)
        with self._named(), drawing():
            for kind in ("svg", "pdf", "png"):
                save_figure(self.figure, folder / f"{self.name}.{kind}", tight=bool(self.legend))
        text = comma_separated([self.columns, *self.rows])
        (folder / f"{self.name}.csv").write_text(text, encoding="utf-8")

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add a legend above the drawing while a file is written; in a page it is made of buttons."""
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
    """Give every method a colour: eight hues, then grey with dashes, as a ninth hue is hard to distinguish.

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
    """Compute mean and range over seeds, at the rounds where every seed has a value."""
    finite = [{r: v for r, v in by_round.items() if np.isfinite(v)} for by_round in series]
    finite = [by_round for by_round in finite if by_round]
    rounds = sorted(set.intersection(*map(set, finite))) if finite else []
    if not rounds:
        return None
    values = np.array([[by_round[r] for r in rounds] for by_round in finite])
    return Band(np.array(rounds, dtype=float), values.mean(0), values.min(0), values.max(0))


def legend(labels: Iterable[str], styles: Mapping[str, Look]) -> list[LegendKey]:
    """List the methods of a chart with their colours; a single one needs no legend."""
    keys = [LegendKey(label, styles[label].css, f"part-series-{styles[label].slot}") for label in labels]
    return keys if len(keys) > 1 else []


def draw_bands(ax: Axes, bands: Mapping[str, Band], styles: Mapping[str, Look]) -> None:
    """Draw one line per method with the range over seeds behind it; a single round is a dot."""
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
    """List what a pointer over these axes shows; the figure must have its final layout."""
    return {
        "box": frame_of(ax),
        "xlim": [round(float(v), 4) for v in ax.get_xlim()],
        "series": [
            {"name": name, "colour": colours[name], "x": x.tolist(), "y": [significant(v) for v in y]}
            for name, (x, y) in series.items()
        ],
    }


def frame_of(ax: Axes) -> list[float]:
    """Compute left, top, right and bottom of the axes in the drawing."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    box, (width, height) = ax.get_position(), figure.get_size_inches() * 72
    edges = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    return [round(float(edge), 2) for edge in edges]


def significant(value: float, digits: int = 4) -> float | None:
    """Round a number for a page; None where it is not finite."""
    return float(f"{value:.{digits}g}") if np.isfinite(value) else None


def settle(figure: Figure) -> None:
    """Compute the layout now and keep it, so that positions can be read."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")


def short(name: str, length: int = 22) -> str:
    """Shorten a name so that it fits on an axis."""
    return name if len(name) <= length else name[: length - 1] + "…"
