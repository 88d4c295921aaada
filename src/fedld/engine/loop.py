"""The round loop: sample, broadcast, train, aggregate, evaluate. There is one, for every method and backend.

Evaluating the model of round t and training for round t+1 both start from the same weights, so their jobs
go to the workers together: nobody waits for an evaluation.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedld import __version__
from fedld.aggregation import Aggregate
from fedld.analysis import decompose
from fedld.analysis.metrics import evaluate_logits
from fedld.data import Federation, load
from fedld.engine.checkpoint import Checkpoint, kept_states, load_checkpoint, save_checkpoint
from fedld.engine.experiment import Experiment, make_experiment, read_toml
from fedld.engine.local import Backend, Failure, InProcess, WorkerPool, allocate, tune_process
from fedld.engine.records import Line, RunDirectory, dump, read_lines, write_atomically
from fedld.engine.states import StateStore
from fedld.engine.work import (
    Arena,
    Incoming,
    Job,
    LossJob,
    Personal,
    PersonalJob,
    Result,
    Setup,
    Sums,
    TestJob,
    Trained,
    TrainJob,
    initial_model,
    make_layout,
)
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Replies, Server
from fedld.seeds import numpy_generator

Progress = Callable[[Line], None]
TEST_CHUNK = 512
LOSS_CHUNK = 2048


class Interrupted(FedLDError):
    """Ctrl-C: the last finished round is on disk."""


def run(experiment: Experiment, out: Path, *, progress: Progress | None = None) -> Line:
    """Run an experiment into a new directory; returns the summary."""
    directory = RunDirectory(out)
    try:
        directory.begin(experiment.to_toml())
        return _Run(experiment, directory, None, progress or _quiet).go()
    finally:
        directory.close()


def resume(out: Path, *, progress: Progress | None = None, warn: Callable[[str], None] | None = None) -> Line:
    """Continue a run after its newest whole checkpoint; a finished run is left as it is."""
    if not (out / "config.toml").exists():
        raise FedLDError(f"'{out}' holds no run to resume")
    directory = RunDirectory(out)
    try:
        if (out / "summary.json").exists():
            return read_lines(out / "summary.json")[0]
        experiment = make_experiment(read_toml(out / "config.toml"))
        checkpoint, warnings = load_checkpoint(out / "checkpoints")
        for warning in warnings:
            (warn or print)(warning)
        directory.truncate(checkpoint.offsets if checkpoint else {})
        return _Run(experiment, directory, checkpoint, progress or _quiet).go()
    finally:
        directory.close()


def _quiet(_: Line) -> None:
    pass


def sample(experiment: Experiment, clients: int, round_: int) -> list[int]:
    """The clients of a round, by number or rate, from the round's own generator."""
    wanted = experiment.sample_clients or max(1, round(experiment.sample_rate * clients))
    if wanted > clients:
        raise FedLDError(f"cannot sample {wanted} of {clients} clients")
    generator = numpy_generator(experiment.seed, "sample", round_)
    return sorted(int(i) for i in generator.choice(clients, wanted, replace=False))


def prepare(experiment: Experiment, states: Path) -> tuple[Setup, Server]:
    """Data, method and model of an experiment, checked; and the server's first state."""
    federation = load(experiment.data_spec())
    method = experiment.make_method()
    model = initial_model(experiment, federation)
    method.check(model)
    layout = make_layout(experiment, method, model)
    server = method.init(layout.flatten(model), layout, len(federation.clients))
    return Setup(experiment, method, federation, layout, states), server


def make_backend(setup: Setup, arena: Arena) -> Backend:
    """Worker processes, or this process when `workers` is 0."""
    workers = setup.experiment.workers
    if workers is None:
        workers = torch.multiprocessing.cpu_count() if setup.experiment.device == "cpu" else 1
    return WorkerPool(setup, arena, workers) if workers else InProcess(setup, arena)


@dataclass
class _Round:
    """One finished training round, before its model has been evaluated."""

    line: Line
    cross: list[list[float]] | None
    errors: list[list[float]] | None
    sampled: list[int]


class _Run:
    def __init__(
        self, experiment: Experiment, directory: RunDirectory, start: Checkpoint | None, progress: Progress
    ) -> None:
        began = time.perf_counter()
        tune_process()
        self.experiment, self.directory, self.progress = experiment, directory, progress
        self.setup, self.server = prepare(experiment, directory.path / "states")
        self.method, self.layout, self.federation = self.setup.method, self.setup.layout, self.setup.federation
        self.sizes = [len(client.train) for client in self.federation.clients]
        self.counts = self.federation.label_counts().tolist()
        self.state_rounds = [0] * len(self.sizes)
        self.round, self.pending, self.seconds = 0, None, 0.0
        if start is not None:
            self._restore(start)
        rows = len(sample(experiment, len(self.sizes), 1))
        self.arena = allocate(self.setup, rows)
        self.backend = make_backend(self.setup, self.arena)
        self.clock = began

    def _restore(self, start: Checkpoint) -> None:
        self.server, self.state_rounds = start.server, list(start.state_rounds)
        self.round, self.seconds = start.round, start.seconds
        self.pending = _Round(**start.pending)

    def go(self) -> Line:
        """Rounds until the last; the record of each is complete before the next is aggregated."""
        try:
            while True:
                self._turn()
                if self.pending is None:
                    return self._finish()
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped after round {self.round}; continue with: fedld run --resume {self.directory.path}"
            ) from None
        except OSError as error:
            raise FedLDError(
                f"cannot write to '{self.directory.path}': {error.strerror}; round {self.round} is safe, "
                f"continue with: fedld run --resume {self.directory.path}"
            ) from None
        finally:
            self.backend.close()

    def _turn(self) -> None:
        """Evaluate the model of this round while training for the next, then aggregate."""
        self.arena.weights.copy_(self.server.weights)
        last = self.round == self.experiment.rounds
        sampled = [] if last else sample(self.experiment, len(self.sizes), self.round + 1)
        training = [TrainJob(self.round + 1, slot, self._incoming(i)) for slot, i in enumerate(sampled)]
        evaluation = self._evaluation_jobs(set(sampled))
        results = self._do([*training, *evaluation])
        trained = self._retry(training, results[: len(training)])
        if self.pending is not None:
            before = {i: r.before for i, r in zip(sampled, trained, strict=True) if isinstance(r, Trained)}
            self._record_round(evaluation, results[len(training) :], before)
        self.pending = None if last else self._aggregate(sampled, trained)
        if self.pending is not None:
            self.round += 1
            self._checkpoint()

    def _do(self, jobs: list[Job]) -> list[Result | Failure]:
        limit = self.experiment.round_timeout
        deadline = None if limit is None else time.monotonic() + limit
        common = self.method.broadcast(self.server)

        def done(job: Job, result: Result | Failure) -> None:
            if isinstance(job, TrainJob):
                client = self.federation.clients[job.incoming.client].name
                self.progress({"event": "client", "round": job.round, "client": client})

        return self.backend.run(jobs, common, done, deadline)

    def _incoming(self, client: int) -> Incoming:
        return Incoming(client, self.state_rounds[client], self.method.personal(self.server, client))

    # evaluation of the model after `self.round`

    def _evaluation_jobs(self, sampled: set[int]) -> list[Job]:
        due = self.round % self.experiment.eval_every == 0 or self.round == self.experiment.rounds
        if self.pending is None:
            return []
        jobs: list[Job] = []
        if due:
            tests = len(self.federation.test)
            jobs += [TestJob(s, min(s + TEST_CHUNK, tests)) for s in range(0, tests, TEST_CHUNK)]
            if self.method.personalised:
                jobs += [PersonalJob(self._incoming(i)) for i in range(len(self.sizes))]
        if self.pending.cross is not None:
            known = sampled if self._losses_come_with_training() else set()
            jobs += [LossJob((j,)) for j in range(len(self.sizes)) if j not in known]
        return jobs

    def _losses_come_with_training(self) -> bool:
        """Whether a client's loss before training is the global model's exact loss, so need not be measured again."""
        e, private = self.experiment, self.layout.size - self.layout.shared_end + self.layout.trainable
        return e.client_losses and e.decompose_samples is None and private == self.layout.shared

    def _record_round(
        self, jobs: list[Job], results: list[Result | Failure], before: dict[int, Sums | None]
    ) -> None:
        assert self.pending is not None
        for result in results:
            if isinstance(result, Failure):
                raise FedLDError(f"evaluation failed in round {self.round}: {result.error}")
        line = dict(self.pending.line)
        if any(isinstance(job, TestJob) for job in jobs):
            labels = torch.from_numpy(np.array(self.federation.labels[self.federation.test]))
            line |= evaluate_logits(self.arena.logits, labels) | self._by_client(labels)
        line |= _personal([r for r in results if isinstance(r, Personal)])
        losses = {i: sums for i, sums in before.items() if sums is not None}
        for job, result in zip(jobs, results, strict=True):
            if isinstance(job, LossJob):
                losses[job.clients[0]] = cast(list[Sums], result)[0]
        if self.pending.cross is not None:
            line |= self._decomposition(self.pending, losses)
        now = time.perf_counter()
        line["seconds"], self.clock = now - self.clock, now
        self.seconds += line["seconds"]
        self.directory.append("rounds.jsonl", line)
        self.progress({"event": "round", "rounds": self.experiment.rounds, **line})

    def _by_client(self, labels: torch.Tensor) -> Line:
        """Accuracy of the global model on each client's own test set, where there are any."""
        right = (self.arena.logits.argmax(1) == labels).numpy()
        own = {
            client.name: float(right[np.isin(self.federation.test, client.test)].mean())
            for client in self.federation.clients
            if len(client.test)
        }
        return {"client_accuracy": own} if own else {}

    def _decomposition(self, done: _Round, losses: dict[int, Sums]) -> Line:
        """Eq. 2 of this round, and its matrix to the run directory."""
        cross = np.array(done.cross)
        global_losses = np.array([losses[j].mean for j in range(len(self.sizes))])
        terms = decompose(cross, global_losses, self.sizes, done.sampled)
        self.directory.append(
            "cross_loss.jsonl",
            {
                "round": self.round,
                "clients": [c.name for c in self.federation.clients],
                "sampled": done.sampled,
                "sizes": self.sizes,
                "cross_loss": done.cross,
                "global_losses": global_losses.tolist(),
                "standard_errors": done.errors,
            },
        )
        return {
            "local_loss": terms.local,
            "shift_loss": terms.shift,
            "aggregation_loss": terms.aggregation,
            "global_loss": terms.total,
            "identity_error": terms.identity_error,
        }

    # aggregation of the next round

    def _retry(self, jobs: list[TrainJob], results: list[Result | Failure]) -> list[Result | Failure]:
        """Failed clients, handled by policy: once more, left out, or the end of the run."""
        failed = [k for k, result in enumerate(results) if isinstance(result, Failure)]
        policy = self.experiment.on_client_failure
        if failed and policy == "retry":
            for k, result in zip(failed, self._do([jobs[k] for k in failed]), strict=True):
                results[k] = result
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Failure) and policy != "skip":
                name = self.federation.clients[job.incoming.client].name
                raise FedLDError(
                    f"client '{name}' failed in round {job.round}: {result.error}; round {self.round} is safe"
                )
        return results

    def _aggregate(self, sampled: list[int], results: list[Result | Failure]) -> _Round:
        """Server step of the round after `self.round` from what the clients replied."""
        sound = [k for k, r in enumerate(results) if isinstance(r, Trained) and r.finite]
        excluded = {self._name(sampled[k]): _why(r) for k, r in enumerate(results) if k not in sound}
        if len(sound) < self.experiment.min_clients:
            raise FedLDError(
                f"round {self.round + 1}: only {len(sound)} usable client(s), {self.experiment.min_clients} needed "
                f"({'; '.join(f'{name}: {why}' for name, why in excluded.items())})"
            )
        trained = [cast(Trained, results[k]) for k in sound]
        clients = [sampled[k] for k in sound]
        replies = Replies(
            self.layout,
            tuple(clients),
            tuple(self._name(i) for i in clients),
            tuple(self.sizes[i] for i in clients),
            self.arena.updates if len(sound) == len(self.arena.updates) else self.arena.updates[sound],
            [r.message for r in trained],
            tuple(r.metrics["steps"] for r in trained),
        )
        bytes_up, bytes_down = self._traffic(replies, sampled)
        incoming = {i: self._incoming(i) for i in clients}
        keeps = {i for i in clients if self._has_state(i)}
        cross, errors = self._cross_losses(sound, incoming, trained, keeps)
        self.server, combined = self.method.server_update(self.server, replies)
        for i in keeps:
            self.state_rounds[i] = self.round + 1
        self._record_clients(sampled, results, clients, combined)
        report = combined.report
        line = {
            "round": self.round + 1,
            "clients": len(clients),
            "excluded": excluded,
            "update_norm": float(combined.update.double().norm()),
            "norm_ratio": report.norm_ratio,
            "cosine_to_average": report.cosine,
            "buffer_disagreement": self._buffer_disagreement(replies),
            "train_loss": sum(r.metrics["train_loss"] * s for r, s in zip(trained, replies.sizes, strict=True))
            / sum(replies.sizes),
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
        }
        self.directory.append("conflict.jsonl", {"round": self.round + 1, "sampled": clients, **report.to_json()})
        return _Round(line, cross, errors, clients)

    def _name(self, client: int) -> str:
        return self.federation.clients[client].name

    def _has_state(self, client: int) -> bool:
        return StateStore(self.setup.states).exists(client, self.round + 1)

    def _traffic(self, replies: Replies, sampled: list[int]) -> tuple[int, int]:
        """Bytes to the server and from it: shared weights and the messages, counted, not estimated."""
        layout = self.layout
        model = 4 * (layout.shared + layout.shared_end - layout.trainable)
        up = model * len(replies.clients) + sum(_bytes(m) for m in replies.messages)
        common = _bytes(self.method.broadcast(self.server))
        own = [self.method.personal(self.server, i) for i in sampled]
        down = sum((0 if "weights" in m else model) + common + _bytes(m) for m in own)
        return up, down

    def _buffer_disagreement(self, replies: Replies) -> float | None:
        """How far clients' BatchNorm means lie apart, in units of the running standard deviation."""
        views = [
            (e, self.layout.entries[k + 1])
            for k, e in enumerate(self.layout.entries)
            if e.name.endswith("running_mean") and not e.private
        ]
        if not views or len(replies.clients) < 2:
            return None
        spreads = [
            (replies.updates[:, mean.start : mean.start + mean.size].std(0)
             / replies.updates[:, var.start : var.start + var.size].mean(0).sqrt().clamp_min(1e-6)).mean()
            for mean, var in views
        ]  # fmt: skip
        return float(torch.stack(spreads).mean())

    def _cross_losses(
        self, slots: list[int], incoming: dict[int, Incoming], trained: list[Trained], keeps: set[int]
    ) -> tuple[list[list[float]] | None, list[list[float]] | None]:
        """M[j, i] = L_j(w_i) for every client j and every client i of this round, before aggregation."""
        e, next_round = self.experiment, self.round + 1
        if not e.decompose or not (next_round in (1, e.rounds) or next_round % e.decompose == 0):
            return None, None
        clients = list(incoming)
        exact = e.decompose_samples is None and e.client_losses
        jobs: list[LossJob] = []
        for slot, i in zip(slots, clients, strict=True):
            others = [j for j in range(len(self.sizes)) if not (exact and j == i)]
            model = replace(incoming[i], state_round=next_round) if i in keeps else incoming[i]
            jobs += [LossJob(group, slot, model) for group in self._groups(others)]
        results = self._do([*jobs])
        cross = np.full((len(self.sizes), len(clients)), np.nan)
        errors = np.full_like(cross, np.nan)
        for column, reply in enumerate(trained):
            if exact and reply.after is not None:
                cross[clients[column], column] = reply.after.mean
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Failure):
                raise FedLDError(f"cross evaluation failed in round {next_round}: {result.error}")
            assert job.incoming is not None
            column = clients.index(job.incoming.client)
            for j, sums in zip(job.clients, cast(list[Sums], result), strict=True):
                cross[j, column], errors[j, column] = sums.mean, sums.standard_error
        return cross.tolist(), None if e.decompose_samples is None else errors.tolist()

    def _groups(self, clients: list[int]) -> list[tuple[int, ...]]:
        """Clients in groups of about equal work, so that few clients still keep all workers busy."""
        groups: list[tuple[int, ...]] = []
        group: list[int] = []
        for j in clients:
            group.append(j)
            if sum(self.sizes[k] for k in group) >= LOSS_CHUNK or j == clients[-1]:
                groups.append(tuple(group))
                group = []
        return groups

    def _record_clients(
        self, sampled: list[int], results: list[Result | Failure], clients: list[int], combined: Aggregate
    ) -> None:
        """One line a client: also for those that were left out, with the reason."""
        report = combined.report
        for i, result in zip(sampled, results, strict=True):
            line: Line = {"round": self.round + 1, "client": self._name(i), "index": i, "size": self.sizes[i]}
            line["label_counts"] = self.counts[i]
            if isinstance(result, Trained):
                line |= {f"loss_{k}": s.mean for k, s in _measured(result)}
                line |= {f"accuracy_{k}": s.accuracy for k, s in _measured(result)}
                line |= result.metrics | {"seconds": result.seconds}
            if i in clients:
                k = clients.index(i)
                line |= {"update_norm": report.norms[k], "cosine_to_aggregate": report.cosines[k]}
            else:
                line["excluded"] = _why(result)
            self.directory.append("clients.jsonl", line)

    def _checkpoint(self) -> None:
        if self.round % self.experiment.checkpoint_every and self.round != self.experiment.rounds:
            return
        assert self.pending is not None
        folder = self.directory.path / "checkpoints"
        facts = (self.round, self.server, tuple(self.state_rounds), vars(self.pending))
        save_checkpoint(folder, Checkpoint(*facts, self.directory.offsets(), self.seconds))
        if any(self.state_rounds):
            StateStore(self.setup.states).prune(kept_states(folder))

    def _finish(self) -> Line:
        """Final model and summary."""
        from safetensors.torch import save

        model: Tree = self.layout.export(self.server.weights)
        write_atomically(self.directory.path / "model.safetensors", save(model))
        rounds = read_lines(self.directory.path / "rounds.jsonl")
        summary = summarise(rounds) | {
            "rounds": self.experiment.rounds,
            "seconds": self.seconds,
            "method": self.experiment.method["name"],
            "dataset": self.experiment.dataset,
            "model": self.experiment.model,
            "parameters": self.layout.trainable,
            "clients": len(self.sizes),
            "seed": self.experiment.seed,
            "version": __version__,
        }
        write_atomically(self.directory.path / "summary.json", dump(summary).encode() + b"\n")
        return summary


def summarise(rounds: list[Line]) -> Line:
    """Final, last-five and best accuracy of the global model, and of the personalised ones where they exist."""
    out: Line = {}
    for key, prefix in (("accuracy", ""), ("personal_accuracy", "personal_")):
        series = [line[key] for line in rounds if line.get(key) is not None]
        if series:
            out[f"{prefix}final_accuracy"] = series[-1]
            out[f"{prefix}last5_accuracy"] = float(np.mean(series[-5:]))
            out[f"{prefix}best_accuracy"] = max(series)
    last = rounds[-1]
    out |= {f"final_{key}": last.get(key) for key in ("auroc", "balanced_accuracy", "loss", "ece")}
    out |= {key: sum(line[key] for line in rounds) for key in ("bytes_up", "bytes_down")}
    return out


def _personal(results: list[Personal]) -> Line:
    """Mean over clients of the personalised models on the global test set, and on their own."""
    if not results:
        return {}
    accuracies = [cast(float, r.metrics["accuracy"]) for r in results]
    line: Line = {"personal_accuracy": float(np.mean(accuracies)), "personal_worst": min(accuracies)}
    own = [r.own_accuracy for r in results if r.own_accuracy is not None]
    return line | ({"personal_own_accuracy": float(np.mean(own))} if own else {})


def _measured(result: Trained) -> list[tuple[str, Sums]]:
    pairs = (("before", result.before), ("after", result.after))
    return [(name, sums) for name, sums in pairs if sums is not None]


def _why(result: Result | Failure) -> str:
    return result.error if isinstance(result, Failure) else "the update is not finite"


def _bytes(tree: Tree) -> int:
    return sum(t.numel() * t.element_size() for t in tree.values())


__all__ = ["Federation", "Interrupted", "prepare", "resume", "run", "sample", "summarise"]
