"""How figures look: one palette for light and dark, matplotlib's settings, and SVG that a page can hold.

Figures are drawn once, in light colours. Inside a page every colour becomes a CSS variable, so the same
drawing is right in both modes; written to a file it keeps its light colours.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_hex
from matplotlib.figure import Figure

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
    """CSS variables of a mode."""
    fixed = {
        "ink": ("#0b0b0b", "#ffffff"),
        "second": ("#52514e", "#c3c2b7"),
        "muted": ("#898781", "#898781"),
        "grid": ("#e1e0d9", "#2c2c2a"),
        "axis": ("#c3c2b7", "#5a5955"),
        "surface": ("#fcfcfb", "#1a1a19"),
    }
    found = {name: pair[dark] for name, pair in fixed.items()}
    found |= {f"s{i}": c for i, c in enumerate(DARK_SERIES if dark else SERIES)}
    for letter, ramp in (("q", _BLUES_DARK if dark else _BLUES), ("d", _POLES_DARK if dark else _POLES)):
        found |= {f"{letter}{i}": colour for i, colour in enumerate(_ramp(ramp))}
    return found


_NAMES = {colour: f"var(--{name})" for name, colour in reversed(variables(dark=False).items())}


def css_variables() -> str:
    """Light by default, dark where the reader's system or the page's switch asks for it, light on paper."""
    light, dark = (";".join(f"--{k}:{v}" for k, v in variables(mode).items()) for mode in (False, True))
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n"
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib's settings for every figure."""
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
    """A figure measured in the page's pixels."""
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def svg_text(figure: Figure, name: str) -> str:
    """The figure as a standalone SVG file."""
    buffer = io.StringIO()
    with drawing(), mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path, *, tight: bool = False) -> None:
    """A file for a paper, the same bytes for the same drawing; `tight` makes room for a legend outside."""
    options: dict[str, Any] = {"facecolor": "white", "dpi": 300} | ({"bbox_inches": "tight"} if tight else {})
    metadata = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with mpl.rc_context({"svg.fonttype": "path", "pdf.fonttype": 42, "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata=metadata, **options)


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an element of a page: colours as CSS variables, unique ids, a name for screen readers.

    `label` must be escaped already.
    """
    text = svg_text(figure, name)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="(part-[a-z0-9-]+)">', r'<g class="\1">', text)
    text = re.sub(r'<g id="[A-Za-z0-9_.]+_\d+">', "<g>", text)
    text = re.sub(r"#[0-9a-f]{6}(?=[;\"])", lambda found: _NAMES.get(found[0], found[0]), text)
    text = re.sub(r"\s*\n\s*", "\n", text)
    box = re.search(r'viewBox="([^"]+)"', text)
    size = box[1] if box else ""
    return re.sub(r"<svg[^>]*>", f'<svg viewBox="{size}" role="img" aria-label="{label}">', text, count=1)
