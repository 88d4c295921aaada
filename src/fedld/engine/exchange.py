"""What the server asks of the clients and gets back: time limits, failures, refusals, quorum, bytes.

What a refused client sent reaches nothing: neither the global model and its buffers nor the server's state
or the client's own state in the next round.
"""

import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedld.aggregation import statistic_problem, too_long
from fedld.engine.backends.base import Backend, SummingBackend
from fedld.engine.checkpoint import newest_round
from fedld.engine.jobs import (
    Failure,
    Incoming,
    Job,
    Prepared,
    PrepareJob,
    RoundJob,
    Setup,
    SharedMemory,
    TrainJob,
)
from fedld.engine.recording import exclusion
from fedld.engine.summing import Adder, Combiner, sum_of_messages
from fedld.errors import FedLDError
from fedld.layout import Layout, Tree, tree_bytes
from fedld.methods import Messages, Method, Server
from fedld.records.schema import Event, Traffic
from fedld.records.writer import RunDirectory

Progress = Callable[[Event], None]
Key = TypeVar("Key", bound=Hashable)


@dataclass(kw_only=True)
class RunState:
    """Where a run stands: the server's state after a round, and the round of every client's newest state."""

    server: Server
    state_rounds: dict[str, int]
    round: int = 0
    measured: int | None = None  # the last round whose model evaluated to finite numbers
    mean: Tensor | None = None  # of the rounds' models, where the final model is one


class Exchange:
    """Hands jobs to the backend and looks at what comes back."""

    def __init__(
        self,
        setup: Setup,
        state: RunState,
        memory: SharedMemory,
        backend: Backend,
        directory: RunDirectory,
        progress: Progress,
        again: str,
    ) -> None:
        self.setup, self.state, self.memory, self.backend = setup, state, memory, backend
        self.directory, self.progress, self.again = directory, progress, again
        self._bytes: Traffic = {"bytes_up": 0, "bytes_down": 0}
        self._common: Tree = {}  # what every client got in the last exchange
        self._asked: Server | None = None  # the state that `_messages` were made of
        self._messages: dict[str, Tree] = {}

    def incoming(self, client: str) -> Incoming:
        """Give the model that a client holds now; a method is asked once, for training and evaluation."""
        server = self.state.server
        if self._asked is not server:
            self._asked, self._messages = server, {}
        if client not in self._messages:
            self._messages[client] = self.setup.method.personal(server, self.setup.rows[client])
        return Incoming(client, self.state.state_rounds[client], self._messages[client])

    @property
    def adder(self) -> Adder:
        """What adds up messages of which the server sees sums alone: the backend, or the transform."""
        if isinstance(self.backend, SummingBackend):
            return self.backend.total
        transform = self.setup.transforms.sums_only
        assert transform is not None
        return transform.total

    @property
    def combiner(self) -> Combiner | None:
        """What combines updates that clients keep; None where the transform itself does."""
        return self.backend.combine if isinstance(self.backend, SummingBackend) else None

    def publish(self) -> None:
        """Put the global weights where the workers read them."""
        self.memory.weights.copy_(self.state.server.weights)

    def do(self, jobs: Mapping[Key, Job]) -> dict[Key, Any]:
        """Run jobs on the backend; gives each result under the key of its job.

        Only a client's part in a round may fail, an evaluation that does ends the run.
        """
        limit, round_ = self.setup.experiment.round_timeout, self.state.round
        deadline = None if limit is None else time.monotonic() + limit
        self._common = self.setup.method.broadcast(self.state.server)
        answers = self.backend.run([*jobs.values()], self._common, self._client_done, deadline)
        results = dict(zip(jobs, answers, strict=True))
        for key, job in jobs.items():
            result = results[key]
            if isinstance(result, Failure):
                self.directory.log(f"round {round_}, {type(job).__name__}", result.detail or result.error)
                if not isinstance(job, RoundJob):
                    error = FedLDError(f"evaluation failed in round {round_}: {result.error}")
                    error.add_note(result.detail)
                    raise error
        return results

    def _client_done(self, job: Job, _: Any) -> None:
        if isinstance(job, TrainJob):
            self.progress({"event": "client", "round": job.round, "client": job.incoming.client})

    def handle_failures(
        self, jobs: Mapping[str, PrepareJob | TrainJob], answers: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Give results by client; failed clients are asked once more, left out, or end the run, by policy."""
        results = {client: answers[client] for client in jobs}
        failed = {name: jobs[name] for name in jobs if isinstance(results[name], Failure)}
        policy = self.setup.experiment.on_client_failure
        if failed and policy == "retry":
            results |= self.do(failed)
        for client, result in results.items():
            if isinstance(result, Failure) and policy != "skip":
                error = FedLDError(
                    f"client '{client}' failed in round {jobs[client].round}: {result.error}; "
                    f"{self.what_is_kept()}"
                )
                error.add_note(result.detail)
                raise error
        return results

    def check_quorum(
        self, results: Mapping[str, Any], used: Collection[str], refused: Mapping[str, str] | None = None
    ) -> None:
        """End the run where too few clients of a round can be used; `refused` says why some cannot."""
        needed = self.setup.experiment.quorum(len(results))
        if len(used) >= needed:
            return
        reasons = {client: exclusion(result) for client, result in results.items()} | dict(refused or {})
        why = [f"{client}: {reasons[client]}" for client in results if client not in used]
        raise FedLDError(
            f"round {self.state.round + 1}: {len(used)} usable clients, at least "
            f"{needed} needed ({'; '.join(why)}); {self.what_is_kept()}"
        )

    def gather(self, asked: Sequence[PrepareJob]) -> tuple[Messages, dict[str, Any]]:
        """Give sound messages of an exchange without training, and the results of clients that sent none."""
        jobs = {job.incoming.client: job for job in asked}
        results = self.handle_failures(jobs, self.do(jobs))
        received = {name: reply.message for name, reply in results.items() if isinstance(reply, Prepared)}
        finite = {name: message for name, message in received.items() if results[name].finite}
        hidden = self.setup.transforms.sums_only is not None
        screened = asked[0].what == "method" and not hidden
        too_long = long_messages(self.setup.method, finite) if screened else {}
        for name, why in too_long.items():
            results[name] = Failure(why, "", "rejected")
        sound = [name for name in finite if isinstance(results[name], Prepared)]
        self.check_quorum(results, sound)
        if hidden:
            heard = {name: received[name] for name in sound}
            messages = sum_of_messages(self.setup, self.adder, heard, asked[0].what)
        else:
            messages = Messages(**self.senders(sound), messages=[received[name] for name in sound])
        sent = [job.incoming.message for job in asked]
        self.count([*received.values()], sent, updates=False)
        return messages, {name: result for name, result in results.items() if name not in sound}

    def senders(self, clients: Collection[str]) -> dict[str, Any]:
        """Say who sent some messages, and how much each counts."""
        return {
            "clients": tuple(clients),
            "rows": [self.setup.rows[client] for client in clients],
            "sizes": tuple(self.setup.sizes[client] for client in clients),
            "client_weights": self.setup.method.client_weights,
        }

    def count(self, received: Sequence[Tree], sent: Sequence[Tree], *, updates: bool) -> None:
        """Enter the bytes of the last exchange into the round's account: counted, not estimated.

        Args:
            received: The messages of all clients that replied.
            sent: The messages that the clients of this round got for themselves.
            updates: Whether each message came beside an update.
        """
        model, common = 4 * self.setup.layout.shared_size, tree_bytes(self._common)
        update = self.setup.update_bytes if updates else 0
        self.enter(
            {
                "bytes_up": update * len(received) + sum(tree_bytes(message) for message in received),
                "bytes_down": sum((0 if "weights" in m else model) + common + tree_bytes(m) for m in sent),
            }
        )

    def enter(self, exchange: Traffic) -> None:
        """Enter the bytes of an exchange, and the seconds of a measurement, into the round's account."""
        account = self._bytes
        account["bytes_up"] += exchange["bytes_up"]
        account["bytes_down"] += exchange["bytes_down"]
        if "measuring_seconds" in exchange:
            seconds = account.get("measuring_seconds", 0.0)
            account["measuring_seconds"] = seconds + exchange["measuring_seconds"]

    def settle(self) -> Traffic:
        """Give the account since the last call, and begin a new one."""
        account, self._bytes = self._bytes, {"bytes_up": 0, "bytes_down": 0}
        return account

    def what_is_kept(self) -> str:
        """Give what is left of a run that ends here, and how to go on."""
        newest = newest_round(self.directory.path / "checkpoints")
        if not newest:
            return "no round was kept"
        word = "safe" if newest == self.state.measured else "kept, though its model was not measured"
        return f"round {newest} is {word}; continue with: {self.again}"


def refusals(
    method: Method,
    layout: Layout,
    updates: Mapping[str, Tensor],
    messages: Mapping[str, Tree],
    server: Server | None = None,
) -> dict[str, str]:
    """Find the replies of a round that cannot be used.

    Args:
        method: Its `max_update_ratio` bounds the updates' lengths; its `update_problem` says which updates
            and messages do not belong together.
        layout: Layout of the updates.
        updates: A vector per client.
        messages: What each of these clients sent beside its update.
        server: The server's state before the round. None where transforms have changed the updates, which
            then need not agree with the messages.

    Returns:
        Why a client is refused, by name; lengths are compared among the clients without another fault.
    """
    refused: dict[str, str] = {}
    lengths: dict[str, float] = {}
    for client, update in updates.items():
        length = float(torch.linalg.vector_norm(update[: layout.shared], dtype=torch.float64))
        if problem := _problem(layout, update, length, messages[client]):
            refused[client] = problem
        else:
            lengths[client] = length
    if method.max_update_ratio is not None:
        refused |= too_long(np.array([*lengths.values()]), [*lengths], method.max_update_ratio)
    if server is None:
        return refused
    for client in [name for name in lengths if name not in refused]:
        if problem := method.update_problem(server, layout, updates[client], messages[client]):
            refused[client] = problem
    return refused


def long_messages(method: Method, messages: Mapping[str, Tree]) -> dict[str, str]:
    """Find the clients with a preparation that is too long by one of the method's `prepared_lengths`."""
    refused: dict[str, str] = {}
    if method.max_update_ratio is None:
        return refused
    by_client = {client: method.prepared_lengths(message) for client, message in messages.items()}
    for key in sorted({key for lengths in by_client.values() for key in lengths}):
        lengths = {client: named[key] for client, named in by_client.items() if key in named}
        refused |= too_long(np.array([*lengths.values()]), [*lengths], method.max_update_ratio, what=key)
    return refused


def _problem(layout: Layout, update: Tensor, length: float, message: Tree) -> str | None:
    """Say why a reply cannot be used, whatever the others sent; None if it can."""
    for key, value in message.items():
        if value.is_floating_point() and key != "statistics" and not bool(value.isfinite().all()):
            return f"its message '{key}' is not finite"
    if not math.isfinite(length):
        return f"its update holds {'NaN' if math.isnan(length) else 'infinite or too large numbers'}"
    vector = update
    if "statistics" in message:
        vector = update.clone()
        layout.private_buffers(vector).copy_(message["statistics"])
    buffers = [entry for entry in layout.entries if entry.kind == "buffer"]
    sent = [entry for entry in buffers if not entry.private or "statistics" in message]
    problems = (statistic_problem(entry.name, entry.view(vector)) for entry in sent)
    return next(filter(None, problems), None)
