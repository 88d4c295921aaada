"""The best model of a run, chosen by the images that the clients set aside; no test image has a say.

The file itself tells of which round it is and how well it did, so a run that is resumed knows what to beat.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from fedld.errors import FedLDError
from fedld.models.files import model_bytes, read_model
from fedld.records.schema import RoundLine
from fedld.records.writer import write_atomically

BEST = "best.safetensors"
Export = Callable[[dict[str, str]], bytes]
"""The round's model as a file whose metadata have these facts too."""


def keep_best(folder: Path, line: RoundLine, export: Export) -> None:
    """Write the round's model if its loss on the validation images is the least so far."""
    loss = line.get("validation_loss")
    if loss is not None and loss < _least(folder / BEST):
        facts = {"round": str(line["round"]), "validation_loss": repr(loss)}
        write_atomically(folder / BEST, export(facts))


def seal_best(folder: Path, provenance: Mapping[str, str]) -> None:
    """At the run's end: the best model says where it comes from, as the last one does."""
    if provenance and (folder / BEST).exists():
        best = read_model(folder / BEST)
        write_atomically(folder / BEST, model_bytes(best.tensors, {**best.metadata, **provenance}))


def _least(file: Path) -> float:
    """The loss to beat; a file that is missing or damaged is beaten by any."""
    try:
        return float(read_model(file).metadata["validation_loss"])
    except (FedLDError, KeyError, ValueError):
        return float("inf")
