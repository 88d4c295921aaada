"""Checkpoints: written aside, synced and renamed, with a checksum, the last two kept."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from safetensors.torch import load, save

from fedld.layout import Tree
from fedld.methods import Server
from fedld.records.schema import CrossMatrix, RoundLine
from fedld.records.writer import Extent, dump, read_checksummed, write_atomically, write_checksummed

KEPT = 2
"""Checkpoints of a run that is under way: the newest may be of a model without a finite loss."""
KEPT_FINISHED = 1
"""Checkpoints of a finished run: what extending it, or making its model again, goes on from."""
TENSORS = re.compile(r"round_\d{5,9}\.safetensors")


class Pending(TypedDict):
    """The record of a round that is aggregated but not evaluated yet."""

    line: RoundLine
    matrix: CrossMatrix | None


@dataclass(frozen=True)
class Checkpoint:
    """The run after the aggregation of a round; generators are derived, so there is no state of theirs."""

    round: int
    server: Server
    state_rounds: dict[str, int]  # by client; 0 where none was kept yet
    pending: Pending
    records: dict[str, Extent]
    seconds: float


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Tensors first, then the small file that makes them count."""
    folder.mkdir(exist_ok=True)
    server = checkpoint.server
    tensors: Tree = {"weights": server.weights, **{f"extra.{k}": v for k, v in server.extra.items()}}
    content = save({key: value.detach().contiguous() for key, value in tensors.items()})
    write_atomically(_tensors(folder, checkpoint.round), content)
    facts = {
        "round": checkpoint.round,
        "sha256": sha256(content).hexdigest(),
        "state_rounds": checkpoint.state_rounds,
        "pending": checkpoint.pending,
        "records": checkpoint.records,
        "seconds": checkpoint.seconds,
    }
    write_checksummed(_facts(folder, checkpoint.round), dump(facts).encode() + b"\n")


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the newest checkpoints, and what a kill during such a deletion has left."""
    for old in _rounds(folder)[:-count]:
        drop_checkpoint(folder, old)
    kept = {_tensors(folder, round_) for round_ in _rounds(folder)}
    for file in folder.glob("round_*.safetensors"):
        if TENSORS.fullmatch(file.name) and file not in kept:
            file.unlink(missing_ok=True)
    for aside in folder.glob("round_*.tmp"):
        aside.unlink(missing_ok=True)


def newest_round(folder: Path) -> int:
    """Round of the newest checkpoint; 0 if there is none."""
    return max(_rounds(folder), default=0)


def drop_checkpoint(folder: Path, round_: int) -> None:
    """Delete the checkpoint of a round, if there is one."""
    _facts(folder, round_).unlink(missing_ok=True)
    _tensors(folder, round_).unlink(missing_ok=True)


def load_checkpoint(
    folder: Path, check: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each that is not.

    `check` raises a ValueError where what the checkpoint refers to (records, states) is not whole.
    """
    problems: list[str] = []
    for round_ in reversed(_rounds(folder)):
        try:
            checkpoint = _read(folder, round_)
            check(checkpoint)
            return checkpoint, problems
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"the checkpoint of round {round_} cannot be used ({error})")
    return None, problems


def set_newer_aside(folder: Path, round_: int) -> None:
    """Rename checkpoints after a round to *.damaged: they count no more, but can be looked at."""
    for newer in _rounds(folder):
        if newer > round_:
            for path in (_facts(folder, newer), _tensors(folder, newer)):
                if path.exists():
                    path.rename(path.with_name(path.name + ".damaged"))


def kept_states(folder: Path) -> set[tuple[str, int]]:
    """(client, round) of every state that a whole checkpoint refers to."""
    found = set()
    for round_ in _rounds(folder):
        try:
            states = json.loads(read_checksummed(_facts(folder, round_)))["state_rounds"]
        except (OSError, ValueError, KeyError):
            continue  # damaged: nobody will go on from it
        found |= {(client, r) for client, r in states.items() if r}
    return found


def _read(folder: Path, round_: int) -> Checkpoint:
    facts = json.loads(read_checksummed(_facts(folder, round_)))
    content = _tensors(folder, round_).read_bytes()
    if sha256(content).hexdigest() != facts["sha256"]:
        raise ValueError("wrong checksum")
    tensors = load(content)
    extra = {key.removeprefix("extra."): value for key, value in tensors.items() if key != "weights"}
    return Checkpoint(
        facts["round"],
        Server(tensors["weights"], extra),
        dict(facts["state_rounds"]),
        facts["pending"],
        facts["records"],
        facts["seconds"],
    )


def _rounds(folder: Path) -> list[int]:
    """Rounds of which there is a checkpoint; whatever else lies in the folder is not ours."""
    names = [re.fullmatch(r"round_(\d{5,9})\.json", path.name) for path in folder.glob("round_*.json")]
    return sorted(int(name[1]) for name in names if name)


def _tensors(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.safetensors"


def _facts(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.json"
