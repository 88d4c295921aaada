"""A federation as a picture: who holds how much of which class, and what its images look like."""

from pathlib import Path

import matplotlib
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedld.data import Federation
from fedld.data.table import Table as Images
from fedld.data.targets import target_facts

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = ("#3b6fb6", "#e08a2e", "#4a9d6f", "#b8487a", "#7b62b3", "#8a8a3c", "#4aa3b5", "#a65f3d")
SHOWN = 8
MOST_FACTS = 6
"""Columns of numbers about targets."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def partition_text(federation: Federation, width: int = 48, *, colour: bool = True) -> Group:
    """Draw bars of label counts for the terminal, with the notes on the partition.

    Without `colour` (a file, a pipe) each class has a letter of its own.
    """
    counts = federation.label_counts()
    table = Table(
        title=f"{federation.name}: {len(federation.clients)} clients, "
        f"{len(federation.test)} test {federation.samples}"
    )
    summaries = [target_facts(federation, client) for client in federation.clients]
    named = list(dict.fromkeys(name for summary in summaries for name in summary))[:MOST_FACTS]
    for heading in ("client", federation.samples, *named, _groups_word(federation)):
        left = heading in ("client", _groups_word(federation))
        table.add_column(heading, justify="left" if left else "right")
    for client, row, summary in zip(federation.clients, counts, summaries, strict=True):
        bar = Text()
        for k, count in enumerate(row):
            length = round(width * count / counts.sum(1).max())
            bar.append(_mark(k, colour) * length, style=COLOURS[k % len(COLOURS)])
        cells = [f"{summary[name]:.3g}" if name in summary else "" for name in named]
        table.add_row(Text(client.name), str(int(row.sum())), *cells, bar)
    legend = Text(f"{_groups_word(federation)}: ")
    for k, name in enumerate(federation.strata_names):
        legend.append(f"{_mark(k, colour)} {name}  ", style=COLOURS[k % len(COLOURS)])
    return Group(table, legend, *(Text(f"note: {note}") for note in federation.notes))


def _groups_word(federation: Federation) -> str:
    """Name what the bars are divided by."""
    return "labels" if federation.task in ("classification", "multilabel") else "groups"


def _mark(number: int, colour: bool) -> str:
    return "█" if colour else LETTERS[number % len(LETTERS)]


def partition_png(federation: Federation, path: Path) -> None:
    """Label counts beside sample images of every client (the first ones, where there are many)."""
    clients = federation.clients[: 3 * SHOWN]
    counts = federation.label_counts()[: len(clients)]
    height = 1 + 0.55 * len(clients)
    pictures = federation.images.ndim == 4
    figure, (bars, images) = plt.subplots(
        1, 2, figsize=(5 + 0.55 * SHOWN, height), width_ratios=(5, 0.55 * SHOWN), layout="constrained"
    )
    left = np.zeros(len(clients))
    for k, name in enumerate(federation.strata_names):
        bars.barh(range(len(clients)), counts[:, k], left=left, color=COLOURS[k % len(COLOURS)], label=name)
        left += counts[:, k]
    bars.set_yticks(range(len(clients)), [client.name for client in clients])
    bars.set(xlabel=f"training {federation.samples}", ylim=(len(clients) - 0.5, -0.5))
    bars.spines[["top", "right"]].set_visible(False)
    columns = min(len(federation.strata_names), 5)
    word = _groups_word(federation)
    bars.legend(title=word, frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1))
    if pictures:
        images.imshow(_contact_sheet(federation, len(clients)), cmap="gray")
    images.set_anchor("SW")
    images.set_axis_off()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def contact_sheet(table: Images, path: Path) -> None:
    """Draw a site's images as it would train on them, a row per class, for a check by eye."""
    images = np.load(table.folder / "images.npy", mmap_mode="r", allow_pickle=False)
    rows = [np.flatnonzero((table.labels == k) & (table.split != "")) for k in range(len(table.classes))]
    figure, axes = plt.subplots(len(rows), 1, figsize=(SHOWN, 1.4 * len(rows)), squeeze=False, layout="tight")
    for axis, name, places in zip(axes[:, 0], table.classes, rows, strict=True):
        chosen = places[np.linspace(0, len(places) - 1, SHOWN).astype(int)] if len(places) else places
        axis.set_title(f"{name}: {len(places)} images", loc="left", fontsize=9)
        axis.set_axis_off()
        if len(chosen):
            axis.imshow(np.concatenate(list(images[chosen]), axis=1), cmap="gray", vmin=0, vmax=255)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _contact_sheet(federation: Federation, clients: int) -> np.ndarray:
    """Arrange a row of images for every client, spread over its samples."""
    _, height, width, channels = federation.images.shape
    sheet = np.full((clients * height, SHOWN * width, channels), 255, np.uint8)
    for i, client in enumerate(federation.clients[:clients]):
        chosen = client.train[np.linspace(0, len(client.train) - 1, SHOWN).astype(int)]
        for k, image in enumerate(federation.images[chosen]):
            sheet[i * height : (i + 1) * height, k * width : (k + 1) * width] = image
    return sheet
