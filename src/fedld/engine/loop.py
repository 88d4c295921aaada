"""The round loop: sample, broadcast, train, aggregate, evaluate. There is one, for every method and backend.

Evaluating the model of round t and training for round t+1 both start from the same weights, so their jobs
go to the workers together: nobody waits for an evaluation.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save

from fedld import __version__
from fedld.engine import cross
from fedld.engine.checkpoint import Checkpoint, kept_states, load_checkpoint, save_checkpoint
from fedld.engine.cross import Member
from fedld.engine.evaluation import evaluation_jobs, evaluation_line, predictions
from fedld.engine.experiment import Experiment, make_experiment, read_toml
from fedld.engine.lines import client_lines, exclusion, round_line, traffic
from fedld.engine.local import Failure, allocate
from fedld.engine.processes import tune_process
from fedld.engine.records import Line, RunDirectory, dump, read_lines, write_atomically
from fedld.engine.setup import LOCAL, Engine, prepare, sample
from fedld.engine.states import StateStore
from fedld.engine.summary import environment, summarise
from fedld.engine.work import Incoming, Job, LossJob, Setup, Sums, Trained, TrainJob
from fedld.errors import FedLDError
from fedld.methods import Replies, Server

Progress = Callable[[Line], None]


class Interrupted(FedLDError):  # noqa: N818 (not an error of anybody's)
    """Ctrl-C: the last finished round is on disk."""


def quiet(_: Line) -> None:
    """Progress that nobody watches."""


def run(experiment: Experiment, out: Path, *, progress: Progress = quiet, engine: Engine = LOCAL) -> Line:
    """Run an experiment into a new directory; returns the summary.

    Data, method and model are checked before the directory is touched.
    """
    setup, server = prepare(experiment, out / "states", engine)
    directory = RunDirectory(out)
    try:
        directory.begin(experiment.to_toml())
        return Run(setup, server, directory, progress, engine).go()
    finally:
        directory.close()


def resume(
    out: Path,
    *,
    progress: Progress = quiet,
    warn: Callable[[str], None] = print,
    engine: Engine = LOCAL,
) -> Line:
    """Continue a run after its newest whole checkpoint; a finished run is left as it is."""
    if not (out / "config.toml").exists():
        raise FedLDError(f"'{out}' holds no run to resume")
    if (out / "summary.json").exists():
        return read_lines(out / "summary.json")[0]
    setup, server = prepare(make_experiment(read_toml(out / "config.toml")), out / "states", engine)
    directory = RunDirectory(out)
    try:
        checkpoint, warnings = load_checkpoint(out / "checkpoints")
        for warning in warnings:
            warn(warning)
        directory.truncate(checkpoint.offsets if checkpoint else {})
        return Run(setup, server, directory, progress, engine, checkpoint).go()
    finally:
        directory.close()


class Run:
    """A run between two rounds: `round` is aggregated, its record `pending` until its model is evaluated."""

    def __init__(
        self,
        setup: Setup,
        server: Server,
        directory: RunDirectory,
        progress: Progress,
        engine: Engine,
        start: Checkpoint | None = None,
    ) -> None:
        self.clock = time.perf_counter()
        tune_process()
        self.setup, self.server, self.directory, self.progress = setup, server, directory, progress
        self.state_rounds = [0] * len(setup.sizes)
        self.round, self.seconds = 0, 0.0
        self.pending: Line | None = None
        if start is not None:
            self.server, self.state_rounds = start.server, list(start.state_rounds)
            self.round, self.seconds, self.pending = start.round, start.seconds, start.pending
        self.arena = allocate(setup, len(sample(setup.experiment, len(setup.sizes), 1)))
        self.backend = engine.backend(setup, self.arena)

    def go(self) -> Line:
        """Rounds until the last."""
        path = self.directory.path
        try:
            while self.round < self.setup.experiment.rounds:
                self._turn(sample(self.setup.experiment, len(self.setup.sizes), self.round + 1))
            self._turn([])
            return self._finish()
        except KeyboardInterrupt:
            hint = f"continue with: fedld run --resume {path}"
            raise Interrupted(f"stopped after round {self.round}; {hint}") from None
        except OSError as error:
            hint = f"round {self.round} is safe, continue with: fedld run --resume {path}"
            raise FedLDError(f"cannot write to '{path}': {error.strerror}; {hint}") from None
        finally:
            self.backend.close()

    def _turn(self, sampled: list[int]) -> None:
        """Evaluate the model of this round while training for the next, then aggregate."""
        self.arena.weights.copy_(self.server.weights)
        training = [TrainJob(self.round + 1, slot, self._incoming(i)) for slot, i in enumerate(sampled)]
        evaluation = self._evaluation(set(sampled))
        results = self._do([*training, *evaluation])
        trained = self._by_policy(training, results[: len(training)])
        if self.pending is not None:
            self._record(evaluation, results[len(training) :], dict(zip(sampled, trained, strict=True)))
        if sampled:
            self.pending = self._aggregate(sampled, trained)
            self.round += 1
            self._checkpoint()

    def _do(self, jobs: Sequence[Job]) -> list[Any]:
        """Run jobs on the backend; only training may fail, an evaluation that does ends the run."""
        limit = self.setup.experiment.round_timeout
        deadline = None if limit is None else time.monotonic() + limit
        common = self.setup.method.broadcast(self.server)
        results = self.backend.run(jobs, common, self._client_done, deadline)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Failure) and not isinstance(job, TrainJob):
                raise FedLDError(f"evaluation failed in round {self.round}: {result.error}")
        return results

    def _client_done(self, job: Job, _: Any) -> None:
        if isinstance(job, TrainJob):
            client = self.setup.federation.clients[job.incoming.client].name
            self.progress({"event": "client", "round": job.round, "client": client})

    def _incoming(self, client: int) -> Incoming:
        message = self.setup.method.personal(self.server, client)
        return Incoming(client, self.state_rounds[client], message)

    def _evaluation(self, training: set[int]) -> list[Job]:
        """Jobs whose results complete the pending record."""
        if self.pending is None:
            return []
        everyone = [self._incoming(i) for i in range(len(self.setup.sizes))]
        jobs = evaluation_jobs(self.setup, self.round, everyone)
        return jobs + (cross.global_jobs(self.setup, training) if self.pending["matrix"] else [])

    def _record(self, jobs: list[Job], results: list[Any], trained: dict[int, Any]) -> None:
        """Complete and write the line of this round."""
        assert self.pending is not None
        line = self.pending["line"] | evaluation_line(self.setup, jobs, results, self.arena.logits)
        if self.pending["matrix"]:
            losses = {i: r.before for i, r in trained.items() if isinstance(r, Trained) and r.before}
            for job, result in zip(jobs, results, strict=True):
                if isinstance(job, LossJob):
                    losses[job.clients[0]] = cast(list[Sums], result)[0]
            terms, matrix = cross.decomposition(self.setup, self.pending["matrix"], losses)
            line |= terms
            self.directory.append("cross_loss.jsonl", {"round": self.round, **matrix})
        now = time.perf_counter()
        line["seconds"], self.clock = now - self.clock, now
        self.seconds += line["seconds"]
        self.directory.append("rounds.jsonl", line)
        self.progress({"event": "round", "rounds": self.setup.experiment.rounds, **line})

    def _by_policy(self, jobs: list[TrainJob], results: list[Any]) -> list[Any]:
        """Failed clients, handled by policy: once more, left out, or the end of the run."""
        failed = [k for k, result in enumerate(results) if isinstance(result, Failure)]
        policy = self.setup.experiment.on_client_failure
        if failed and policy == "retry":
            for k, result in zip(failed, self._do([jobs[k] for k in failed]), strict=True):
                results[k] = result
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Failure) and policy != "skip":
                name = self.setup.federation.clients[job.incoming.client].name
                raise FedLDError(
                    f"client '{name}' failed in round {job.round}: {result.error}; round {self.round} is safe"
                )
        return results

    def _aggregate(self, sampled: list[int], results: list[Any]) -> Line:
        """Server step from what the clients replied; gives the pending record of the new round."""
        setup, round_ = self.setup, self.round + 1
        members = [
            Member(i, slot, self._incoming(i), result)
            for slot, (i, result) in enumerate(zip(sampled, results, strict=True))
            if isinstance(result, Trained) and result.finite
        ]
        self._check_quorum(sampled, results, members)
        matrix = None
        if cross.due(setup.experiment, round_):
            jobs = cross.cross_jobs(setup, round_, members)
            matrix = cross.cross_matrix(setup, members, jobs, self._do(jobs))
        replies = self._replies(members)
        bytes_ = traffic(setup, self.server, replies, sampled)
        self.server, combined = setup.method.server_update(self.server, replies)
        for member in members:
            if member.trained.kept:
                self.state_rounds[member.client] = round_
        for line in client_lines(setup, round_, sampled, results, combined):
            self.directory.append("clients.jsonl", line)
        clients = [member.client for member in members]
        self.directory.append(
            "conflict.jsonl", {"round": round_, "sampled": clients, **combined.report.to_json()}
        )
        return {"line": round_line(round_, replies, members, combined) | bytes_, "matrix": matrix}

    def _check_quorum(self, sampled: list[int], results: list[Any], members: list[Member]) -> None:
        if len(members) >= self.setup.experiment.min_clients:
            return
        used = {member.client for member in members}
        names = {i: self.setup.federation.clients[i].name for i in sampled}
        why = [f"{names[i]}: {exclusion(r)}" for i, r in zip(sampled, results, strict=True) if i not in used]
        raise FedLDError(
            f"round {self.round + 1}: {len(members)} usable clients, at least "
            f"{self.setup.experiment.min_clients} needed ({'; '.join(why)}); round {self.round} is safe"
        )

    def _replies(self, members: list[Member]) -> Replies:
        updates = self.arena.updates
        if len(members) < len(updates):
            updates = updates[[member.slot for member in members]]
        return Replies(
            self.setup.layout,
            tuple(member.client for member in members),
            tuple(self.setup.federation.clients[member.client].name for member in members),
            tuple(self.setup.sizes[member.client] for member in members),
            updates,
            [member.trained.message for member in members],
            tuple(member.trained.metrics["steps"] for member in members),
        )

    def _checkpoint(self) -> None:
        experiment, folder = self.setup.experiment, self.directory.path / "checkpoints"
        if self.round % experiment.checkpoint_every and self.round != experiment.rounds:
            return
        assert self.pending is not None
        states = tuple(self.state_rounds)
        offsets = self.directory.offsets()
        save_checkpoint(
            folder, Checkpoint(self.round, self.server, states, self.pending, offsets, self.seconds)
        )
        if any(states):
            StateStore(self.setup.states).prune(kept_states(folder))

    def _finish(self) -> Line:
        """Final model, predictions and summary; the summary comes last and marks the run as finished."""
        setup, path = self.setup, self.directory.path
        if setup.method.has_global:
            write_atomically(path / "model.safetensors", save(setup.layout.export(self.server.weights)))
            write_atomically(path / "predictions.json", dump(predictions(setup, self.arena.logits)).encode())
        summary = summarise(read_lines(path / "rounds.jsonl")) | {
            "rounds": setup.experiment.rounds,
            "seconds": self.seconds,
            "method": setup.experiment.method["name"],
            "dataset": setup.experiment.dataset,
            "model": setup.experiment.model,
            "parameters": setup.layout.trainable,
            "clients": len(setup.sizes),
            "seed": setup.experiment.seed,
            "version": __version__,
            "environment": environment(),
        }
        write_atomically(path / "summary.json", dump(summary).encode() + b"\n")
        return summary
