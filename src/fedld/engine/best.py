"""The best model of a run, chosen by the images that the clients set aside; no test image has a say.

The file itself tells of which round it is and how well it did, so a run that is resumed knows what to beat.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from fedld.config.experiment import Experiment
from fedld.engine.callbacks import Callback
from fedld.errors import FedLDError
from fedld.models.files import model_bytes, read_model
from fedld.records.schema import ROUNDS, RoundLine
from fedld.records.writer import each_line, write_atomically

BEST = "best.safetensors"
Export = Callable[[dict[str, str]], bytes]
"""The round's model as a file whose metadata have these facts too."""


class BestModel(Callback):
    """Keep the model with the least loss on the validation images; a run without such images has none.

    Args:
        export: gives the round's model as a file.
    """

    sees_model = False

    def __init__(self, export: Export) -> None:
        self.export = export
        self.least = math.inf

    def begin(self, experiment: Experiment, out: Path) -> None:
        """Read the loss to beat."""
        self.folder = out
        self.least = _least(out) if experiment.validation is not None else math.inf

    def after_round(self, line: RoundLine, model: nn.Module) -> None:
        """Write the round's model if its loss is the least so far."""
        loss = line["validation"].get("loss") if "validation" in line else None
        if loss is not None and loss < self.least:
            facts = {"round": str(line["round"]), "validation_loss": repr(loss)}
            write_atomically(self.folder / BEST, self.export(facts))
            self.least = loss


def seal_best(folder: Path, provenance: Mapping[str, str]) -> None:
    """At the run's end: the best model says where it comes from, as the last one does."""
    if provenance and (folder / BEST).exists() and not damage(folder / BEST):
        best = read_model(folder / BEST)
        write_atomically(folder / BEST, model_bytes(best.tensors, {**best.metadata, **provenance}))


def damage(file: Path) -> str | None:
    """A sentence if a model file is missing or not as it was written."""
    if not file.exists():
        return f"'{file}' is missing"
    try:
        read_model(file)
    except FedLDError as error:
        return str(error)
    return None


def _least(folder: Path) -> float:
    """The loss to beat: the best model's, or where its file cannot be read, that of the earlier rounds."""
    try:
        return float(read_model(folder / BEST).metadata["validation_loss"])
    except (FedLDError, KeyError, ValueError):
        losses = [
            line["validation"].get("loss") for line in each_line(folder, ROUNDS) if "validation" in line
        ]
        return min((loss for loss in losses if loss is not None), default=math.inf)
