"""Checkpoints: written aside, synced and renamed, vouched for by a checksum, the last two kept."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from fedld.engine.records import dump, write_atomically
from fedld.layout import Tree
from fedld.methods import Server

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """The run after the aggregation of a round; generators are derived, so there is no state of theirs."""

    round: int
    server: Server
    state_rounds: tuple[int, ...]
    pending: dict[str, Any]
    offsets: dict[str, int]
    seconds: float


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Tensors first, then the small file that makes them count, then the oldest goes."""
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
        "offsets": checkpoint.offsets,
        "seconds": checkpoint.seconds,
    }
    body = dump(facts)
    write_atomically(
        _facts(folder, checkpoint.round), f"{sha256(body.encode()).hexdigest()}\n{body}\n".encode()
    )
    for old in _rounds(folder)[:-KEPT]:
        _facts(folder, old).unlink()
        _tensors(folder, old).unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a warning for each that is not."""
    warnings: list[str] = []
    for round_ in reversed(_rounds(folder)):
        try:
            return _read(folder, round_), warnings
        except (OSError, ValueError, KeyError) as error:
            warnings.append(f"checkpoint of round {round_} is damaged ({error}); using the one before")
    return None, warnings


def kept_states(folder: Path) -> set[tuple[int, int]]:
    """(client, round) of every state that a kept checkpoint refers to."""
    found = set()
    for round_ in _rounds(folder):
        facts = json.loads(_facts(folder, round_).read_text().splitlines()[1])
        found |= {(client, r) for client, r in enumerate(facts["state_rounds"]) if r}
    return found


def _read(folder: Path, round_: int) -> Checkpoint:
    digest, _, body = _facts(folder, round_).read_text().rstrip("\n").partition("\n")
    if sha256(body.encode()).hexdigest() != digest:
        raise ValueError("wrong checksum")
    facts = json.loads(body)
    content = _tensors(folder, round_).read_bytes()
    if sha256(content).hexdigest() != facts["sha256"]:
        raise ValueError("wrong checksum")
    tensors = load(content)
    extra = {key.removeprefix("extra."): value for key, value in tensors.items() if key != "weights"}
    server = Server(tensors["weights"], extra)
    return Checkpoint(
        facts["round"],
        server,
        tuple(facts["state_rounds"]),
        facts["pending"],
        facts["offsets"],
        facts["seconds"],
    )


def _rounds(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("round_")) for path in folder.glob("round_*.json"))


def _tensors(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.safetensors"


def _facts(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.json"
