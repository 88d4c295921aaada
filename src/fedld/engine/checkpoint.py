"""What a run keeps on its way: checkpoints and the best model, and whether they are whole when it goes on.

Checkpoints are written aside, synced and renamed, with a checksum, and the last two are kept. Nothing is
deleted that cannot be computed again: where no checkpoint is whole, the run is left as it is. The best
model is chosen by the images that the clients set aside; its file says of which round it is and how well it
did, so that a run that is resumed knows what to beat.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

from safetensors.torch import load, save
from torch import Tensor, nn

from fedld.config.experiment import Experiment
from fedld.config.resolve import make_method
from fedld.data import Federation
from fedld.engine.callbacks import Callback
from fedld.engine.client_data import StateStore
from fedld.engine.jobs import Setup
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Server
from fedld.models.files import model_bytes, read_model
from fedld.records.reader import read_object, read_records, read_run, read_summary
from fedld.records.schema import ROUNDS, CrossMatrix, RoundLine, Summary
from fedld.records.writer import (
    Extent,
    RunDirectory,
    dump,
    each_line,
    read_checksummed,
    write_atomically,
    write_checksummed,
)

KEPT = 2
"""Checkpoints of a run that is under way: the newest may be of a model without a finite loss."""
KEPT_FINISHED = 1
"""Checkpoints of a finished run: what extending it, or making its model again, goes on from."""
TENSORS = re.compile(r"round_\d{5,9}\.safetensors")


class Pending(TypedDict):
    """The record of a round that is aggregated but not evaluated yet."""

    line: RoundLine
    matrix: CrossMatrix | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The run after the aggregation of a round; generators are derived, so there is no state of theirs."""

    round: int
    server: Server
    state_rounds: dict[str, int]  # by client; 0 where none was kept yet
    pending: Pending
    records: dict[str, Extent]
    seconds: float
    mean: Tensor | None = None  # of the rounds' models


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write tensors first, then the small file that makes them count."""
    folder.mkdir(exist_ok=True)
    server = checkpoint.server
    tensors: Tree = {"weights": server.weights, **{f"extra.{k}": v for k, v in server.extra.items()}}
    if checkpoint.mean is not None:
        tensors["mean"] = checkpoint.mean
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
    """Give the newest checkpoint that is whole, and a sentence for each that is not.

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
    """Give (client, round) of every state that a whole checkpoint refers to."""
    referred = set()
    for round_ in _rounds(folder):
        try:
            states = json.loads(read_checksummed(_facts(folder, round_)))["state_rounds"]
        except (OSError, ValueError, KeyError):
            continue  # damaged: no run will go on from it
        referred |= {(client, r) for client, r in states.items() if r}
    return referred


def _read(folder: Path, round_: int) -> Checkpoint:
    facts = json.loads(read_checksummed(_facts(folder, round_)))
    content = _tensors(folder, round_).read_bytes()
    if sha256(content).hexdigest() != facts["sha256"]:
        raise ValueError("wrong checksum")
    tensors = load(content)
    extra = {key.removeprefix("extra."): value for key, value in tensors.items() if key.startswith("extra.")}
    return Checkpoint(
        round=facts["round"],
        server=Server(tensors["weights"], extra),
        state_rounds=dict(facts["state_rounds"]),
        pending=facts["pending"],
        records=facts["records"],
        seconds=facts["seconds"],
        mean=tensors.get("mean"),
    )


def _rounds(folder: Path) -> list[int]:
    """Give rounds of which there is a checkpoint; whatever else lies in the folder is not ours."""
    names = [re.fullmatch(r"round_(\d{5,9})\.json", path.name) for path in folder.glob("round_*.json")]
    return sorted(int(name[1]) for name in names if name)


def _tensors(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.safetensors"


def _facts(folder: Path, round_: int) -> Path:
    return folder / f"round_{round_:05d}.json"


BEST = "best.safetensors"
Export = Callable[[dict[str, str]], bytes]
"""Makes a file of the round's model with some facts in its metadata."""


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
    """Seal the best model at the run's end: it says where it comes from, as the last one does."""
    if provenance and (folder / BEST).exists() and not damage(folder / BEST):
        best = read_model(folder / BEST)
        write_atomically(folder / BEST, model_bytes(best.tensors, {**best.metadata, **provenance}))


def damage(file: Path) -> str | None:
    """Give a sentence if a model file is missing or not as it was written."""
    if not file.exists():
        return f"'{file}' is missing"
    try:
        read_model(file)
    except FedLDError as error:
        return str(error)
    return None


def _least(folder: Path) -> float:
    """Give the loss to beat: the best model's, or if its file cannot be read, that of the earlier rounds."""
    try:
        return float(read_model(folder / BEST).metadata["validation_loss"])
    except (FedLDError, KeyError, ValueError):
        losses = [
            line["validation"].get("loss") for line in each_line(folder, ROUNDS) if "validation" in line
        ]
        return min((loss for loss in losses if loss is not None), default=math.inf)


Warn = Callable[[str], None]
GONE = "cannot be made again: restore the file from a backup, or start a new run with another --out"


def finished(out: Path, experiment: Experiment, warn: Warn) -> Summary | None:
    """Read the summary of a finished run and check its models.

    Args:
        out: the run directory.
        experiment: its settings.
        warn: gets a sentence on what will be made again.

    Returns:
        The summary. None if the run is unfinished, or if its summary or last model has to be made again from
        the last checkpoint.

    Raises:
        FedLDError: a model is missing or damaged and cannot be made again.
    """
    summary = read_summary(out)
    if summary is None:
        if (out / "summary.json").exists():
            warn(f"'{out / 'summary.json'}' is damaged and is written again")
        return None
    lost = damage(out / "model.safetensors") if make_method(experiment).has_global else None
    best = summary["validated"]["round"] if "validated" in summary else None
    if best is not None and (problem := damage(out / BEST)):
        if best != summary["rounds"]:
            raise FedLDError(f"{problem}, and the model of round {best} {GONE}")
        lost = lost or problem
    if lost is None:
        if changed := read_run(out).failure:
            warn(changed)
        return summary
    if summary["rounds"] < experiment.rounds:
        raise FedLDError(f"{lost}, and the model of round {summary['rounds']}, which ended the run, {GONE}")
    warn(f"{lost}: it is made again from the last checkpoint")
    return None


def extend(out: Path, experiment: Experiment, rounds: int) -> Experiment:
    """Give a run more rounds than it was begun with; what it has done stays."""
    if rounds < experiment.rounds:
        raise FedLDError(f"the run in '{out}' has {experiment.rounds} rounds, which cannot become {rounds}")
    if rounds == experiment.rounds:
        return experiment
    if experiment.dp:
        raise FedLDError("dp: the noise is set for the rounds of the run, so it gets no further ones")
    longer = experiment.model_copy(update={"rounds": rounds})
    directory = RunDirectory(out)  # refuses if another process is writing
    try:
        (out / "summary.json").unlink(missing_ok=True)
        write_atomically(out / "config.toml", longer.to_toml().encode())
    finally:
        directory.close()
    return longer


def check_data(out: Path, federation: Federation) -> None:
    """Raise an error if the clients, their images or the test set are not those that the run began with."""
    before, now = read_object(out / "federation.json"), federation.describe()
    if before is None:
        raise FedLDError(
            f"'{out / 'federation.json'}' is missing or damaged, so the data cannot be compared "
            "with those that the run began with: restore the file, or start a new run with another --out"
        )
    if before.get("fingerprint") != now["fingerprint"]:
        raise FedLDError(
            f"the data is not what the run in '{out}' began with ({_difference(before, now)}): put it back, "
            "or start a new run with another --out"
        )


def last_checkpoint(setup: Setup, directory: RunDirectory, states: bool, warn: Warn) -> Checkpoint | None:
    """Give the newest checkpoint from which the run can go on.

    None if it was stopped before its first one.
    """
    folder = directory.path / "checkpoints"

    def whole(checkpoint: Checkpoint) -> None:
        directory.check(checkpoint.records)
        if states:
            StateStore(setup.states).check(checkpoint.state_rounds)

    checkpoint, problems = load_checkpoint(folder, whole)
    if checkpoint is None:
        _may_start_over(setup, directory.path, problems)
        return None
    for problem in problems:
        warn(f"{problem}; going on after round {checkpoint.round}")
    size, clients = len(checkpoint.server.weights), len(checkpoint.state_rounds)
    if size != setup.layout.size or clients != len(setup.sizes):
        raise FedLDError(
            f"the checkpoint in '{folder}' is of a model of {size} numbers and {clients} clients, but "
            f"config.toml asks for {setup.layout.size} and {len(setup.sizes)}: put back the settings "
            "that the run began with"
        )
    set_newer_aside(folder, checkpoint.round)
    return checkpoint


def _may_start_over(setup: Setup, out: Path, problems: list[str]) -> None:
    """Raise an error unless the run never came to a checkpoint: else it may not be begun anew."""
    rounds = [line["round"] for line in read_records(out, ROUNDS).lines]
    if problems or max(rounds, default=0) >= setup.experiment.checkpoint_every:
        raise FedLDError(
            f"no checkpoint in '{out / 'checkpoints'}' is whole ({'; '.join(problems) or 'there is none'}): "
            "restore one from a backup, or start a new run with another --out; nothing was changed"
        )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Give the first thing that differs, in words."""
    for key in ("classes", "image_shape", "test"):
        if before.get(key) != now[key]:
            return f"{key.replace('_', ' ')}: {before.get(key)}, now {now[key]}"
    old = {client["name"]: client["labels"] for client in before.get("clients") or []}
    new = {client["name"]: client["labels"] for client in now["clients"]}
    for name in [*old, *new]:
        if old.get(name) != new.get(name):
            counts = [f"{sum(side[name])} images" if name in side else "absent" for side in (old, new)]
            return f"client '{name}': {counts[0]}, now {counts[1]}"
    return "the numbers of images are the same, the images or their order are not"
