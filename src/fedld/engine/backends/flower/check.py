"""`fedld site check`: does a site's data fit, and what would leave the site?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedld import __version__
from fedld.config.experiment import Experiment
from fedld.config.resolve import make_method
from fedld.data import Federation
from fedld.data.table import Table
from fedld.engine.backends.flower.federation import PLAIN, FileFacts, describe, open_site, relabel
from fedld.engine.backends.flower.wire import Description
from fedld.engine.network import divided, make_layout
from fedld.errors import FedLDError
from fedld.tasks import TASKS


@dataclass(frozen=True)
class SiteReport:
    """What was found, what is wrong with it, and what would be sent."""

    table: Table
    description: Description
    problems: tuple[str, ...]
    bytes_up: int | None
    decompose: bool

    def lines(self) -> Iterator[str]:
        """The report for a reader."""
        found, table = self.description, self.table
        samples = "rows" if table.features else "images"
        yield f"training {samples}: {found.train}"
        yield f"test {samples}: {found.test}"
        if found.shape:
            height, width, channels = found.shape
            yield f"shape: {height} x {width}, {channels} channel(s)"
        for column in found.columns:
            kinds = {"text": f"text, {len(column.levels)} categories", "empty": "no cell has a value"}
            missing = ", cells are missing" if column.missing else ""
            yield f"column '{column.name}': {kinds.get(column.kind, 'number')}{missing}"
        word = "class" if table.task == "classification" else "group"
        names = TASKS[table.task].strata_names(table.classes)
        for name, count in zip(names, found.label_counts, strict=True):
            yield f"{word} '{name}': {count} training {samples}"
        yield f"unreadable files: {len(self.table.skipped)}"
        yield from (f"  {name}" for name in self.table.skipped)
        yield from (f"note: {note}" for note in self.table.notes)
        yield from self._leaving()
        yield from (f"PROBLEM: {problem}" for problem in self.problems)

    def _leaving(self) -> Iterator[str]:
        update = "the model's update" + ("" if self.bytes_up is None else f" ({self.bytes_up:,} bytes)")
        yield "what would leave the site:"
        if self.table.features:
            yield "  at the start: its name, fedld's version, the names of the columns, the number of rows of"
            yield "    each class and category, and of each column of numbers the sum and the sum of squares"
        else:
            yield "  at the start: its name, fedld's version, the shape of the images, the number of images"
            yield "    of each class, and for each channel the sum and the sum of squares of all pixels"
        if self.description.target_sums:
            yield "    the number of targets, their sum and the sum of their squares"
        yield f"  each round: {update}, what the method adds to it, sums of losses and hits, time taken"
        if self.table.task == "classification":
            yield "  at the end: accuracy, AUROC and sensitivity on its own test images, with intervals"
        if self.decompose:
            yield "    (this experiment decomposes the loss: the other sites receive this site's model, too)"
        yield "what never leaves: images, labels of single images, file names, the personal part of the model"


def check_site(
    data: Path,
    experiment: Experiment | None = None,
    classes: Sequence[str] | None = None,
    files: FileFacts = PLAIN,
) -> SiteReport:
    """Open a site's data as a run would, list what cannot be read, and compare it with an experiment."""
    if not data.exists():
        raise FedLDError(f"there is no file or folder '{data}'")
    table = open_site(str(data), experiment.image_size if experiment else None, replace(files, skip_bad=True))
    description = describe(table, "site", __version__, table.classes)
    problems = tuple(_problems(table, classes))
    bytes_up = None if experiment is None else _bytes_up(experiment, classes or table.classes, table)
    return SiteReport(
        table, description, problems, bytes_up, experiment is not None and experiment.decompose > 0
    )


def _problems(table: Table, classes: Sequence[str] | None) -> Iterator[str]:
    if table.skipped:
        yield f"{len(table.skipped)} files cannot be read: mend or remove them, or start with --skip-bad"
    try:
        relabel(table, classes or table.classes)
    except FedLDError as error:
        yield str(error)


def _bytes_up(experiment: Experiment, classes: Sequence[str], table: Table) -> int:
    """Size of one update: the shared parameters and buffers; other sites' categories would add some."""
    federation = Federation(
        name="",
        folder=table.folder,
        classes=tuple(classes),
        clients=(),
        test=table.labels,
        mean=(),
        std=(),
        task=table.task,
    )
    method = make_method(experiment)
    unfilled = experiment.model_copy(update={"weights": None})
    _, model = divided(unfilled, method, federation)
    return 4 * make_layout(experiment, method, model).shared_size
