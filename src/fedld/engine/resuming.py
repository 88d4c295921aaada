"""Before a run goes on: is what lies on disk whole, and is it still the run that was begun?

Nothing is deleted here that cannot be computed again: where no checkpoint is whole, the run is left as it is.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedld.config.experiment import Experiment
from fedld.config.resolve import make_method
from fedld.data import Federation
from fedld.engine.best import BEST, damage
from fedld.engine.checkpoint import Checkpoint, load_checkpoint, set_newer_aside
from fedld.engine.jobs import Setup
from fedld.engine.states import StateStore
from fedld.errors import FedLDError
from fedld.records.reader import read_object, read_records, read_run, read_summary
from fedld.records.schema import ROUNDS, Summary
from fedld.records.writer import RunDirectory, write_atomically

Warn = Callable[[str], None]
GONE = "cannot be made again: restore the file from a backup, or start a new run with another --out"


def finished(out: Path, experiment: Experiment, warn: Warn) -> Summary | None:
    """Read the summary of a finished run and check its models.

    Args:
        out: the run directory.
        experiment: its settings.
        warn: is told what will be made again.

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
    directory = RunDirectory(out)  # nobody else may be writing
    try:
        (out / "summary.json").unlink(missing_ok=True)
        write_atomically(out / "config.toml", longer.to_toml().encode())
    finally:
        directory.close()
    return longer


def check_data(out: Path, federation: Federation) -> None:
    """Error if the clients, their images or the test set are not those that the run began with."""
    before, now = read_object(out / "federation.json"), federation.describe()
    if before is None:
        raise FedLDError(
            f"'{out / 'federation.json'}' is missing or damaged, so nobody can tell whether the data is "
            "still what the run began with: restore the file, or start a new run with another --out"
        )
    if before.get("fingerprint") != now["fingerprint"]:
        raise FedLDError(
            f"the data is not what the run in '{out}' began with ({_difference(before, now)}): put it back, "
            "or start a new run with another --out"
        )


def last_checkpoint(setup: Setup, directory: RunDirectory, states: bool, warn: Warn) -> Checkpoint | None:
    """The newest checkpoint from which the run can go on; None if it was stopped before its first one."""
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
    """A run may only be begun anew if it never came to a checkpoint."""
    rounds = [line["round"] for line in read_records(out, ROUNDS).lines]
    if problems or max(rounds, default=0) >= setup.experiment.checkpoint_every:
        raise FedLDError(
            f"no checkpoint in '{out / 'checkpoints'}' is whole ({'; '.join(problems) or 'there is none'}): "
            "restore one from a backup, or start a new run with another --out; nothing was changed"
        )


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first thing that differs, in words."""
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
