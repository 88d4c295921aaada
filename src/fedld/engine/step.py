"""The server's step: from what the clients trained to the next global model, and the records of both."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedld.engine.candidates import Measuring
from fedld.engine.checkpoint import Pending
from fedld.engine.exchange import Exchange
from fedld.engine.jobs import Trained, TrainJob
from fedld.engine.measure import after_training, cross_jobs, cross_matrix, decomposition_due
from fedld.engine.recording import client_lines, conflict_line, round_line
from fedld.engine.screening import refusals
from fedld.methods import Replies
from fedld.records.schema import CLIENTS, CONFLICT


def server_step(exchange: Exchange, jobs: Sequence[TrainJob], results: Mapping[str, Any]) -> Pending:
    """Aggregate a round; gives its record, which is `pending` until the new model is evaluated."""
    setup, state, round_ = exchange.setup, exchange.state, exchange.state.round + 1
    received = {client: result for client, result in results.items() if isinstance(result, Trained)}
    refused = _refused(exchange, jobs, {client: one for client, one in received.items() if one.finite})
    trained = {client: one for client, one in received.items() if one.finite and client not in refused}
    exchange.check_quorum(results, trained, refused)
    used = [job for job in jobs if job.incoming.client in trained]
    matrix = None
    if decomposition_due(setup.experiment, round_):
        losses = cross_jobs(setup, used, trained)
        matrix = cross_matrix(setup, trained, losses, exchange.do(losses))
    models = [after_training(job, trained[job.incoming.client]) for job in used]
    measuring = Measuring(setup, exchange.memory, exchange.do, round_, models)
    replies = _replies(exchange, used, trained, measuring)
    sent = [job.incoming.message for job in jobs]
    exchange.count([one.message for one in received.values()], sent, updates=True)
    state.server, combined = setup.method.server_update(state.server, replies)
    combined = combined.without(refused)
    state.state_rounds |= {client: round_ for client, one in trained.items() if one.has_state}
    lines = client_lines(setup, round_, results, combined)
    for line in lines:
        exchange.directory.append(CLIENTS, line)
    exchange.directory.append(CONFLICT, conflict_line(round_, replies, combined))
    cost = measuring.cost(exchange.settle())
    state.round = round_
    record = round_line(round_, replies, trained, combined, cost, lines)
    if choices := setup.method.choices(state.server):
        record["choices"] = choices
    return {"line": record, "matrix": matrix}


def _refused(exchange: Exchange, jobs: Sequence[TrainJob], finite: Mapping[str, Trained]) -> dict[str, str]:
    """Clients whose finite reply is refused, and why."""
    rows = {job.incoming.client: exchange.memory.updates[job.slot] for job in jobs}
    return refusals(
        exchange.setup.method,
        exchange.setup.layout,
        {client: rows[client] for client in finite},
        {client: one.message for client, one in finite.items()},
    )


def _replies(
    exchange: Exchange, used: Sequence[TrainJob], trained: Mapping[str, Trained], measuring: Measuring
) -> Replies:
    """What the method's server gets to see of a round: the clients that were accepted."""
    updates = exchange.memory.updates
    if len(used) < len(updates):
        updates = updates[[job.slot for job in used]]
    return Replies(
        **exchange.senders(trained),
        messages=[one.message for one in trained.values()],
        layout=exchange.setup.layout,
        updates=updates,
        steps=tuple(one.metrics["steps"] for one in trained.values()),
        measure=measuring,
    )
