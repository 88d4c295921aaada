"""A run from its start to its end, or on from a checkpoint. There is one loop, for every method and backend.

What happens in a round is in `rounds.py`, phase by phase. Exchanges without training come before the first
round and after the last one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fedld.config.experiment import Experiment, make_experiment, read_toml
from fedld.engine import rounds
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import THIS_MACHINE, allocate, as_engine
from fedld.engine.backends.processes import tune_process
from fedld.engine.callbacks import Callback, Function, callbacks_of
from fedld.engine.checkpoint import (
    KEPT,
    KEPT_FINISHED,
    BestModel,
    Checkpoint,
    Pending,
    check_data,
    extend,
    finished,
    keep_newest,
    kept_states,
    last_checkpoint,
    save_checkpoint,
)
from fedld.engine.client_data import StateStore
from fedld.engine.exchange import Exchange, Progress, RunState
from fedld.engine.finish import finish, model_file
from fedld.engine.hardware import changed, environment
from fedld.engine.jobs import PrepareJob, Setup
from fedld.engine.measure import decomposition
from fedld.engine.network import divided, loaded
from fedld.engine.setup import facts_of, notes, prepare, sample
from fedld.errors import FedLDError, Interrupted
from fedld.methods import Server
from fedld.methods.moments import set_head
from fedld.methods.start import ClosedStart
from fedld.models import as_model, head_names
from fedld.models.centring import set_centres
from fedld.models.standardise import moments
from fedld.records.reader import read_run
from fedld.records.schema import CROSS_LOSS, ROUNDS, Event, RoundLine, Summary
from fedld.records.writer import RunDirectory


def _notes(progress: Progress) -> Callable[[str], None]:
    """Give sentences about the run, as events."""
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
        return RoundLoop(
            setup, server, directory=directory, progress=progress, engine=engine, callbacks=added
        ).go()
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
        return RoundLoop(
            setup,
            server,
            directory=directory,
            progress=progress,
            engine=engine,
            start=checkpoint,
            callbacks=added,
        ).go()
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
        self.state = RunState(server=server, state_rounds=dict.fromkeys(setup.sizes, 0))
        self.pending: Pending | None = None
        if start is not None:
            self.state = RunState(
                server=start.server,
                state_rounds=dict(start.state_rounds),
                round=start.round,
                mean=start.mean,
            )
            self.seconds, self.pending = start.seconds, start.pending
        rows = len(sample(setup.experiment, setup.sizes, 1))
        self.memory = allocate(setup, rows, shared=engine.shares_memory(setup))
        backend, self.provenance = engine.backend(setup, self.memory), engine.provenance
        again = engine.resuming(directory.path)
        self.exchange = Exchange(
            setup,
            self.state,
            memory=self.memory,
            backend=backend,
            directory=directory,
            progress=progress,
            again=again,
        )
        self.callbacks: list[Callback] = [BestModel(self._model_file), *callbacks]
        self.stopped = False

    def go(self) -> Summary:
        """Run rounds until the last, or until a callback ends the run."""
        path, experiment, state = self.directory.path, self.setup.experiment, self.state
        self.directory.fail(None)
        try:
            for callback in self.callbacks:
                callback.begin(experiment, path)
            if state.round == 0 and standardises(experiment):
                standardise(self.exchange)
            if state.round == 0 and experiment.steps == "centred":
                centre(self.exchange)
            if state.round == 0 and experiment.start == "closed":
                start_closed(self.exchange)
            while state.round < experiment.rounds and not self.stopped:
                self._advance()
            if not self.stopped:
                if state.mean is not None:
                    take_mean(self.exchange)
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
            self.pending = rounds.record(
                exchange, trainings=trainings, accepted=accepted, step=step, matrix=matrix
            )
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
        model = self._model() if any(added.sees_model for added in self.callbacks) else nn.Identity()
        answers = [callback.after_round(line, model) for callback in self.callbacks]
        self.stopped = True in answers

    def _model(self) -> nn.Module:
        """Give the global model of the round."""
        setup, state = self.setup, self.setup.layout.export(self.state.server.weights)
        return loaded(setup.experiment, setup.method, setup.federation, state)

    def _model_file(self, facts: dict[str, str]) -> bytes:
        """Give the global model of the round as a file with some facts."""
        return model_file(self.setup, self.state.server.weights, facts)

    def _checkpoint(self) -> None:
        experiment, folder = self.setup.experiment, self.directory.path / "checkpoints"
        round_, states = self.state.round, self.state.state_rounds
        if round_ % experiment.checkpoint_every and round_ != experiment.rounds:
            return
        assert self.pending is not None
        records = self.directory.extents()
        save_checkpoint(
            folder,
            Checkpoint(
                round=round_,
                server=self.state.server,
                state_rounds=states,
                pending=self.pending,
                records=records,
                seconds=self.seconds,
                mean=self.state.mean,
            ),
        )
        self._keep_checkpoints(max(KEPT, experiment.keep_checkpoints or KEPT))

    def _keep_checkpoints(self, count: int) -> None:
        """Delete older checkpoints and the states that only they refer to."""
        folder = self.directory.path / "checkpoints"
        keep_newest(folder, count)
        if any(self.state.state_rounds.values()):
            StateStore(self.setup.states).prune(kept_states(folder))


def standardises(experiment: Experiment) -> bool:
    """Say whether the head's inputs are standardised; the moments of all records would have no epsilon."""
    return experiment.train == "head" and experiment.standardise and not experiment.dp


def standardise(exchange: Exchange) -> None:
    """Give the head's inputs mean 0 and deviation 1 over all clients' images, before the first round.

    Sums over images add up, so the clients' sums give the moments that pooled images would.
    """
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    messages, _ = exchange.gather([PrepareJob(0, exchange.incoming(c), "features") for c in setup.sizes])
    total, squares = messages.stack("sums").sum(0)
    shift, scale = moments(total, squares, messages.stack("count").sum())
    weights = state.server.weights.clone()
    for name, view in setup.layout.views(weights).items():
        if name.endswith((".shift", ".scale")):
            view.copy_(shift if name.endswith(".shift") else scale)
    state.server = replace(state.server, weights=weights)


def centre(exchange: Exchange) -> None:
    """Give centred steps the mean inputs of the trained layers over all images, before the first round."""
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    messages, _ = exchange.gather([PrepareJob(0, exchange.incoming(c), "centres") for c in setup.sizes])
    sums, count = messages.stack("sums").sum(0), messages.stack("count").sum()
    weights = set_centres(state.server.weights, setup.layout, sums, count.item())
    state.server = replace(state.server, weights=weights)


def start_closed(exchange: Exchange) -> None:
    """Start the head at the ridge solution, scaled by the measured temperature, before the first round."""
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    incoming = [exchange.incoming(client) for client in setup.sizes]
    sums, _ = exchange.gather([PrepareJob(0, model, "closed") for model in incoming])
    start = ClosedStart(sums.messages)
    asked = [replace(model, message={**model.message, **start.plan}) for model in incoming]
    errors, _ = exchange.gather([PrepareJob(0, model, "closed") for model in asked])
    head, choices = start.solve(errors.messages)
    names = head_names(as_model(divided(setup.experiment, setup.method, setup.federation)[1]))
    weights = set_head(state.server.weights, setup.layout, names, *head)
    # Some methods keep copies of the first weights, so their state is made anew.
    sizes = [client.size for client in setup.federation.clients]
    state.server = setup.method.init(weights, setup.layout, sizes)
    values = ", ".join(f"{name} {value:.3g}" for name, value in choices.items())
    exchange.progress({"event": "note", "text": f"the head starts at its closed form: {values}"})


def take_mean(exchange: Exchange) -> None:
    """Make the mean of the rounds' models the final one; counters of batches stay those of the last round.

    As for `calibrate`, the checkpoint of the last round is from before it.
    """
    state, entries = exchange.state, exchange.setup.layout.entries
    assert state.mean is not None
    weights = state.mean.clone()
    for entry in entries:
        if entry.kind == "counter":
            entry.view(weights).copy_(entry.view(state.server.weights))
    state.server = replace(state.server, weights=weights)


def calibrate(exchange: Exchange, line: RoundLine) -> None:
    """Calibrate after the last round: all clients answer, the final model changes, `line` gets the bytes.

    The checkpoint of that round is from before it, so a run that is resumed calibrates again.
    """
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    jobs = [PrepareJob(state.round + 1, exchange.incoming(client)) for client in setup.sizes]
    messages, _ = exchange.gather(jobs)
    state.server = setup.method.calibrate(state.server, messages)
    sent = exchange.settle()
    line["bytes_up"] += sent["bytes_up"]
    line["bytes_down"] += sent["bytes_down"]
