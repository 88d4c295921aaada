"""A run from its start to its end, or on from a checkpoint. There is one loop, for every method and backend.

What happens in a round is in `rounds.py`, phase by phase.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedld.config.experiment import Experiment, make_experiment, read_toml
from fedld.engine import rounds
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import THIS_MACHINE, as_engine
from fedld.engine.backends.processes import tune_process
from fedld.engine.backends.shared import allocate
from fedld.engine.best import BestModel
from fedld.engine.callbacks import Callback, Function, callbacks_of
from fedld.engine.checkpoint import (
    KEPT,
    KEPT_FINISHED,
    Checkpoint,
    Pending,
    keep_newest,
    kept_states,
    save_checkpoint,
)
from fedld.engine.environment import changed, environment
from fedld.engine.exchange import Exchange, Progress, RunState
from fedld.engine.finish import finish, model_file
from fedld.engine.jobs import Setup
from fedld.engine.measure import decomposition
from fedld.engine.network import loaded
from fedld.engine.preparing import calibrate, standardise, standardises, start_closed
from fedld.engine.resuming import check_data, extend, finished, last_checkpoint
from fedld.engine.setup import facts_of, notes, prepare, sample
from fedld.engine.states import StateStore
from fedld.errors import FedLDError, Interrupted
from fedld.methods import Server
from fedld.records.reader import read_run
from fedld.records.schema import CROSS_LOSS, ROUNDS, Event, RoundLine, Summary
from fedld.records.writer import RunDirectory


def _notes(progress: Progress) -> Callable[[str], None]:
    """Sentences about the run, as events."""
    return lambda text: progress({"event": "note", "text": text})


def quiet(_: Event) -> None:
    """Show no progress."""


def run(
    experiment: Experiment,
    out: Path,
    *,
    progress: Progress = quiet,
    engine: Engine | str = THIS_MACHINE,
    callbacks: Sequence[Callback | Function] = (),
) -> Summary:
    """Run an experiment into a new directory; returns the summary.

    Data, method and model are checked before the directory is touched.
    """
    tell, added, engine = _notes(progress), callbacks_of(experiment, callbacks), as_engine(engine)
    setup, server = prepare(experiment, out / "states", engine, tell)
    for note in notes(setup):
        tell(note)
    directory = RunDirectory(out)
    try:
        directory.begin(experiment.to_toml(), environment(), setup.federation.describe(), facts_of(setup))
        return RoundLoop(setup, server, directory, progress, engine, callbacks=added).go()
    finally:
        directory.close()


def resume(
    out: Path,
    *,
    progress: Progress = quiet,
    warn: Callable[[str], None] = print,
    engine: Engine | str = THIS_MACHINE,
    own: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback | Function] = (),
    rounds: int | None = None,
    wait_for_clients: float | None = None,
) -> Summary:
    """Continue a run after its newest whole checkpoint; a finished run is left as it is.

    `own` are the values for which the run's settings have names only. With more `rounds` than it has, a run
    goes on as if it had been begun with them. `wait_for_clients` are the seconds to wait for sites this time.
    """
    if not (out / "config.toml").exists():
        raise FedLDError(f"'{out}' holds no run to resume")
    experiment = make_experiment(read_toml(out / "config.toml"), own)
    if rounds is not None:
        experiment = extend(out, experiment, rounds)
    elif summary := finished(out, experiment, warn):
        return summary
    if wait_for_clients is not None:
        experiment = experiment.model_copy(update={"wait_for_clients": wait_for_clients})
    before, added, engine = read_run(out), callbacks_of(experiment, callbacks), as_engine(engine)
    setup, server = prepare(experiment, out / "states", engine, _notes(progress))
    directory = RunDirectory(out)
    try:
        check_data(out, setup.federation)
        checkpoint = last_checkpoint(setup, directory, engine.keeps_states, warn)
        if before.environment and (elsewhere := changed(before.environment, environment())):
            warn(elsewhere)
        directory.truncate(checkpoint.records if checkpoint else {})
        return RoundLoop(setup, server, directory, progress, engine, checkpoint, added).go()
    finally:
        directory.close()


class RoundLoop:
    """A run between two rounds: one is aggregated, its record `pending` until its model is evaluated."""

    def __init__(
        self,
        setup: Setup,
        server: Server,
        directory: RunDirectory,
        progress: Progress,
        engine: Engine,
        start: Checkpoint | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.clock, self.seconds = time.perf_counter(), 0.0
        tune_process()
        self.setup, self.directory, self.progress = setup, directory, progress
        self.state = RunState(server, dict.fromkeys(setup.sizes, 0))
        self.pending: Pending | None = None
        if start is not None:
            self.state = RunState(start.server, dict(start.state_rounds), start.round)
            self.seconds, self.pending = start.seconds, start.pending
        rows = len(sample(setup.experiment, setup.sizes, 1))
        self.memory = allocate(setup, rows, shared=engine.shares_memory(setup))
        backend, self.provenance = engine.backend(setup, self.memory), engine.provenance
        again = engine.resuming(directory.path)
        self.exchange = Exchange(setup, self.state, self.memory, backend, directory, progress, again)
        self.callbacks: list[Callback] = [BestModel(self._model_file), *callbacks]
        self.stopped = False

    def go(self) -> Summary:
        """Rounds until the last, or until a callback ends the run."""
        path, experiment, state = self.directory.path, self.setup.experiment, self.state
        self.directory.fail(None)
        try:
            for callback in self.callbacks:
                callback.begin(experiment, path)
            if state.round == 0 and standardises(experiment):
                standardise(self.exchange)
            if state.round == 0 and experiment.start == "closed":
                start_closed(self.exchange)
            while state.round < experiment.rounds and not self.stopped:
                self._advance()
            if not self.stopped:
                if self.setup.method.calibrates:
                    assert self.pending is not None
                    calibrate(self.exchange, self.pending["line"])
                self._advance()
            self._keep_checkpoints(experiment.keep_checkpoints or KEPT_FINISHED)
            summary = finish(self.exchange, self.provenance, self.seconds)
            for callback in self.callbacks:
                callback.end(summary)
            return summary
        except KeyboardInterrupt:
            hint = f"continue with: {self.exchange.again}"
            raise Interrupted(f"stopped after round {state.round}; {hint}") from None
        except OSError as error:
            kept = self.exchange.what_is_kept()
            raise FedLDError(f"cannot write to '{path}': {error.strerror}; {kept}") from None
        except FedLDError as error:
            self.directory.fail(str(error))
            raise
        finally:
            self.exchange.backend.close()
            self.memory.release()

    def _advance(self) -> None:
        """Play a round: evaluate its starting model, train, aggregate; after the last one evaluate only."""
        exchange = self.exchange
        exchange.publish()
        sampled = rounds.draw_clients(exchange)
        missing = rounds.prepare(exchange, sampled)
        trainings = rounds.train(exchange, sampled, missing, self.pending)
        if self.pending is not None:
            self._record(self.pending, trainings)
        if sampled and not self.stopped:
            accepted = rounds.accept(exchange, trainings)
            matrix = rounds.cross_losses(exchange, accepted)
            step = rounds.aggregate(exchange, accepted)
            rounds.apply(exchange, accepted, step)
            self.pending = rounds.record(exchange, trainings, accepted, step, matrix)
            self._checkpoint()

    def _record(self, pending: Pending, trainings: rounds.Trainings) -> None:
        """Complete the line of the last round with its model's evaluation, and write it."""
        line: RoundLine = {**pending["line"], **trainings.measures}
        if pending["matrix"]:
            terms, matrix = decomposition(self.setup, self.state.round, pending["matrix"], trainings.losses)
            line = {**line, **terms}
            self.directory.append(CROSS_LOSS, matrix)
        now = time.perf_counter()
        line["seconds"], self.clock = now - self.clock, now
        self.seconds += line["seconds"]
        self.directory.append(ROUNDS, line)
        self.progress({"event": "round", "rounds": self.setup.experiment.rounds, **line})
        model = self._model() if any(one.sees_model for one in self.callbacks) else nn.Identity()
        answers = [callback.after_round(line, model) for callback in self.callbacks]
        self.stopped = True in answers

    def _model(self) -> nn.Module:
        """The global model of the round."""
        setup, state = self.setup, self.setup.layout.export(self.state.server.weights)
        return loaded(setup.experiment, setup.method, setup.federation, state)

    def _model_file(self, facts: dict[str, str]) -> bytes:
        """The global model of the round as a file with some facts."""
        return model_file(self.setup, self.state.server.weights, facts)

    def _checkpoint(self) -> None:
        experiment, folder = self.setup.experiment, self.directory.path / "checkpoints"
        round_, states = self.state.round, self.state.state_rounds
        if round_ % experiment.checkpoint_every and round_ != experiment.rounds:
            return
        assert self.pending is not None
        records = self.directory.extents()
        save_checkpoint(
            folder, Checkpoint(round_, self.state.server, states, self.pending, records, self.seconds)
        )
        self._keep_checkpoints(max(KEPT, experiment.keep_checkpoints or KEPT))

    def _keep_checkpoints(self, count: int) -> None:
        """Delete older checkpoints and the states that only they refer to."""
        folder = self.directory.path / "checkpoints"
        keep_newest(folder, count)
        if any(self.state.state_rounds.values()):
            StateStore(self.setup.states).prune(kept_states(folder))
