"""A round, phase by phase. Read from top to bottom, this file is the algorithm.

    sample      draw the clients of the round
    prepare     ask them for what the method needs before training, where it does
    train       they train, and their updates pass the run's transforms; meanwhile the last model is evaluated
    accept      screen the replies: what is refused reaches nothing
    aggregate   the method's server step; where its rule proposes candidates, the clients measure them first
    apply       the new server state, and the new states of the accepted clients
    evaluate    the model of the round, together with the training of the next one
    record      one line for the round and one for each client

Evaluating the model of round t and training for round t+1 start from the same weights, so their jobs go to
the workers together: no worker waits for an evaluation. A round's record is therefore `pending` for a while.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedld.aggregation import Aggregate, Candidates, Measured, Vote
from fedld.engine.checkpoint import Pending, drop_checkpoint
from fedld.engine.exchange import Exchange, refusals
from fedld.engine.jobs import CandidateJob, Failure, Job, LossJob, PrepareJob, Setup, Trained, TrainJob
from fedld.engine.measure import (
    after_training,
    cross_jobs,
    cross_matrix,
    decomposition_due,
    evaluation_jobs,
    evaluation_line,
    global_jobs,
)
from fedld.engine.private import spend_budgets
from fedld.engine.recording import client_lines, conflict_line, mean_training_loss, round_line
from fedld.engine.setup import sample
from fedld.engine.summing import (
    TrainingLosses,
    choose_by_sums,
    combined_updates,
    sum_of_updates,
    training_losses,
)
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Method, Replies, Server
from fedld.records.schema import CLIENTS, CONFLICT, CrossMatrix, Evaluation, Traffic
from fedld.tasks import Tally
from fedld.transforms import Total


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """The training of a round, and what came of it.

    jobs: by client, in the order in which they were drawn
    results: by client: trained, or why not
    measures: of the model of the last round, evaluated in the same exchange
    losses: of that model at single clients, for the decomposition of the last round
    """

    jobs: dict[str, TrainJob]
    results: dict[str, Any]
    measures: Evaluation
    losses: dict[str, Tally]


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The replies that count: by client, as the method sees them, their losses, who was refused and why."""

    trained: dict[str, Trained]
    jobs: dict[str, TrainJob]
    replies: Replies
    refused: dict[str, str]
    losses: TrainingLosses


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """What the server makes of a round: its next state, the aggregate, and what measuring cost."""

    server: Server
    combined: Aggregate
    measuring: Traffic | None = None


# sample, prepare


def draw_clients(exchange: Exchange) -> list[str]:
    """Draw the clients of the next round; none after the last."""
    setup, round_ = exchange.setup, exchange.state.round + 1
    return sample(setup.experiment, setup.sizes, round_) if round_ <= setup.experiment.rounds else []


def prepare(exchange: Exchange, sampled: list[str]) -> dict[str, Any]:
    """Let clients prepare where the method asks for it; gives the results of those that failed in it."""
    state, method = exchange.state, exchange.setup.method
    if not sampled or not method.prepares:
        return {}
    jobs = [PrepareJob(state.round + 1, exchange.incoming(client)) for client in sampled]
    messages, missing = exchange.gather(jobs)
    state.server = method.gather(state.server, messages)
    return missing


# train (and evaluate the last round's model)


def train(
    exchange: Exchange, sampled: list[str], missing: Mapping[str, Any], pending: Pending | None
) -> Trainings:
    """Train the clients that are not missing, and evaluate the model that the pending record is about."""
    round_ = exchange.state.round + 1
    jobs = {name: TrainJob(round_, slot, exchange.incoming(name)) for slot, name in enumerate(sampled)}
    present = {name: job for name, job in jobs.items() if name not in missing}
    if exchange.setup.private:
        spend_budgets(
            exchange.setup.experiment, exchange.setup.private, present, exchange.directory.path.name
        )
    evaluation = _evaluation(exchange, pending, set(present))
    together: dict[tuple[str, str | int], Job] = {("train", name): job for name, job in present.items()}
    together |= {("evaluate", number): job for number, job in evaluation.items()}
    results_by_key = exchange.do(together)
    evaluated = [(job, results_by_key["evaluate", number]) for number, job in evaluation.items()]
    answers = {name: results_by_key["train", name] for name in present}
    measures = evaluation_line(exchange.setup, exchange.state.round, evaluated, exchange.memory.logits)
    _note_measured(exchange, measures)
    results = dict(missing) | exchange.handle_failures(present, answers)
    return Trainings(
        jobs=jobs,
        results={name: results[name] for name in sampled},
        measures=measures,
        losses=_global_losses(results, evaluated),
    )


def _evaluation(exchange: Exchange, pending: Pending | None, training: set[str]) -> dict[int, Job]:
    """Make the jobs, by number, that complete the pending record."""
    if pending is None:
        return {}
    jobs = evaluation_jobs(exchange.setup, exchange.state.round, exchange.incoming)
    if pending["matrix"]:
        jobs += global_jobs(exchange.setup, training)
    return dict(enumerate(jobs))


def _note_measured(exchange: Exchange, measures: Evaluation) -> None:
    """Drop the checkpoint of a model that gives no finite loss: it is no place to go on from."""
    state = exchange.state
    if "test" not in measures:
        return  # no evaluation was due
    if measures["test"]["loss"] is not None:
        state.measured = state.round
    else:
        drop_checkpoint(exchange.directory.path / "checkpoints", state.round)


def _global_losses(trained: Mapping[str, Any], evaluated: list[tuple[Job, Any]]) -> dict[str, Tally]:
    """Give losses of the global model by client: measured for themselves, or before its training."""
    losses = {name: r.before for name, r in trained.items() if isinstance(r, Trained) and r.before}
    for job, result in evaluated:
        if isinstance(job, LossJob) and not job.validation:
            losses[job.clients[0]] = cast(list[Tally], result)[0]
    return losses


# accept


def accept(exchange: Exchange, trainings: Trainings) -> Accepted:
    """Screen the replies of a round, count their bytes and check that enough of them are left."""
    setup, memory = exchange.setup, exchange.memory
    received = {name: result for name, result in trainings.results.items() if isinstance(result, Trained)}
    sent = [job.incoming.message for job in trainings.jobs.values()]
    exchange.count([result.message for result in received.values()], sent, updates=True)
    finite = {name: result for name, result in received.items() if result.finite}
    rows = {name: memory.updates[trainings.jobs[name].slot] for name in finite}
    if setup.transforms.sums_only is not None:
        return _accept_sum(exchange, trainings, finite, rows)
    messages = {name: result.message for name, result in finite.items()}
    before = None if setup.transforms else exchange.state.server
    refused = refusals(setup.method, setup.layout, updates=rows, messages=messages, server=before)
    trained = {name: result for name, result in finite.items() if name not in refused}
    exchange.check_quorum(trainings.results, trained, refused)
    jobs = {name: trainings.jobs[name] for name in trained}
    return Accepted(
        trained=trained,
        jobs=jobs,
        replies=_replies(exchange, jobs, trained),
        refused=refused,
        losses=TrainingLosses(mean_training_loss(setup, trained)),
    )


def _accept_sum(
    exchange: Exchange, trainings: Trainings, finite: dict[str, Trained], rows: dict[str, Tensor]
) -> Accepted:
    """Let the method see mean update and summed messages alone; what single clients sent stays hidden."""
    exchange.check_quorum(trainings.results, finite)
    messages = {name: result.message for name, result in finite.items()}
    replies, total = _hidden_replies(exchange, rows, messages)
    trained = {name: result for name, result in finite.items() if name in total.clients}
    refused = {name: "its update is not in the sum" for name in finite if name not in trained}
    exchange.check_quorum(trainings.results, trained, refused)
    jobs = {name: trainings.jobs[name] for name in trained}
    return Accepted(
        trained=trained, jobs=jobs, replies=replies, refused=refused, losses=training_losses(total)
    )


def _hidden_replies(
    exchange: Exchange, rows: dict[str, Tensor], messages: dict[str, Tree]
) -> tuple[Replies, Total]:
    """Give what the method sees where single updates are hidden: a sum, or the rule's combination."""
    setup = exchange.setup
    if not _opens_gram(setup):
        return sum_of_updates(setup, exchange.adder, rows, messages)
    replies, total = combined_updates(setup, exchange.combiner, rows, messages)
    exchange.enter({"bytes_up": total.sent, "bytes_down": total.delivered})
    return replies, total


def _opens_gram(setup: Setup) -> bool:
    """Say whether lengths and angles of updates are known, though no single update is."""
    transform = setup.transforms.sums_only
    return transform is not None and transform.opens_gram


def _replies(exchange: Exchange, jobs: Mapping[str, TrainJob], trained: Mapping[str, Trained]) -> Replies:
    """Give what the method's server gets to see of a round."""
    updates = exchange.memory.updates
    if len(jobs) < len(updates):
        updates = updates[[job.slot for job in jobs.values()]]
    return Replies(
        **exchange.senders(trained),
        messages=[result.message for result in trained.values()],
        layout=exchange.setup.layout,
        updates=updates,
        steps=tuple(result.metrics["steps"] for result in trained.values()),
    )


def cross_losses(exchange: Exchange, accepted: Accepted) -> CrossMatrix | None:
    """Measure every accepted model at every client, in the rounds that are decomposed (Eq. 2)."""
    setup = exchange.setup
    if not decomposition_due(setup.experiment, exchange.state.round + 1):
        return None
    jobs = dict(enumerate(cross_jobs(setup, [*accepted.jobs.values()], accepted.trained)))
    answers = exchange.do(jobs)
    return cross_matrix(setup, accepted.trained, [(job, answers[key]) for key, job in jobs.items()])


# aggregate


def aggregate(exchange: Exchange, accepted: Accepted) -> ServerStep:
    """Let the method make its next state; candidates that its rule proposes are measured first."""
    method, server, replies = exchange.setup.method, exchange.state.server, accepted.replies
    after, combined = _server_update(method, server, replies)
    if combined.candidates is None:
        return ServerStep(server=after, combined=combined)
    votes, cost = measure(exchange, accepted, combined.candidates, method.buffers(replies))
    if replies.summed:
        rule = cast(Measured, combined.rule)
        trial = choose_by_sums(
            exchange.setup, exchange.adder, rule=rule, candidates=combined.candidates, votes=votes
        )
    else:
        weights = dict(zip(combined.report.clients, combined.report.weights, strict=True))
        trial = combined.rule.choose(votes, weights)
    after, combined = _server_update(method, server, replace(replies, trial=trial))
    return ServerStep(server=after, combined=combined, measuring=cost)


def _server_update(method: Method, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
    """Give the method's next state; what its server side fails of is one sentence."""
    try:
        return method.server_update(server, replies)
    except RuntimeError as error:  # torch's word for tensors that do not fit
        raise FedLDError(
            f"the server side of method {type(method).__name__} failed: {error}; an update has "
            f"{replies.layout.shared} numbers: a state of that size is self.zero_update(weights, layout)"
        ) from error


def measure(
    exchange: Exchange, accepted: Accepted, candidates: Candidates, buffers: Tensor
) -> tuple[dict[str, Vote | str], Traffic]:
    """Ask the clients for their losses at candidate steps, with the buffers that the model will have.

    Directions travel once, whatever the number of candidates; one number per candidate comes back.
    """
    start, layout, basis = time.perf_counter(), exchange.setup.layout, exchange.memory.basis
    layout.shared_parameters(basis[:-1]).copy_(candidates.basis)
    layout.shared_buffers(basis[-1]).copy_(buffers)
    round_ = exchange.state.round + 1
    jobs = {
        name: CandidateJob(
            round=round_,
            incoming=after_training(job, accepted.trained[name]),
            coefficients=candidates.coefficients,
            samples=candidates.samples,
        )
        for name, job in accepted.jobs.items()
    }
    votes = {
        name: f"it could not measure: {answer.error}" if isinstance(answer, Failure) else answer
        for name, answer in exchange.do(jobs).items()
    }
    return votes, {
        "bytes_down": 4 * len(jobs) * (candidates.basis.numel() + buffers.numel()),
        "bytes_up": 16 * len(jobs) * len(candidates.coefficients),
        "measuring_seconds": time.perf_counter() - start,
    }


# apply, record


def apply(exchange: Exchange, accepted: Accepted, step: ServerStep) -> None:
    """Take over the server's next state, and the states that accepted clients kept."""
    state = exchange.state
    state.server, state.round = step.server, state.round + 1
    if decay := exchange.setup.experiment.average_models:
        state.mean = mean_of_models(state.mean, step.server.weights, round_=state.round, decay=decay)
    for name, result in accepted.trained.items():
        if result.has_state:
            state.state_rounds[name] = state.round


def mean_of_models(mean: Tensor | None, weights: Tensor, *, round_: int, decay: float) -> Tensor:
    """Update the mean of the rounds' models, in which each counts `decay` times as much as the next.

        mean_t = sum_s decay^(t - s) w_s / sum_s decay^(t - s)

    Args:
        mean: of the rounds before; None in round 1.
        weights: the model of this round.
        round_: its number t.
        decay: from 0 to 1.

    Returns:
        The mean with this round's model.

    >>> one, two = torch.tensor([1.0]), torch.tensor([4.0])
    >>> first = mean_of_models(None, one, round_=1, decay=0.5)
    >>> round(mean_of_models(first, two, round_=2, decay=0.5).item(), 6)
    3.0
    """
    if mean is None:
        return weights.clone()
    return torch.lerp(mean, weights, (1 - decay) / (1 - decay**round_))


def record(
    exchange: Exchange,
    trainings: Trainings,
    accepted: Accepted,
    step: ServerStep,
    matrix: CrossMatrix | None,
) -> Pending:
    """Write the lines of the clients; gives that of the round, which lacks the new model's evaluation."""
    setup, round_ = exchange.setup, exchange.state.round
    combined = step.combined.without(accepted.refused)
    hidden = setup.transforms.sums_only is not None and not _opens_gram(setup)
    summed = accepted.trained if hidden else ()
    lines = client_lines(setup, round_, results=trainings.results, combined=combined, summed=summed)
    for line in lines:
        exchange.directory.append(CLIENTS, line)
    if not hidden:
        exchange.directory.append(CONFLICT, conflict_line(round_, accepted.replies, combined))
    if step.measuring is not None:
        exchange.enter(step.measuring)
    sent = exchange.settle()
    round_record = round_line(
        round_,
        replies=accepted.replies,
        losses=accepted.losses,
        combined=combined,
        sent=sent,
        lines=lines,
    )
    choices = setup.method.choices(exchange.state.server)
    trial = combined.report.trial
    if hidden and trial is not None:  # there is no line of conflicts that could tell
        choices = {**choices, "step": trial.lengths[trial.chosen], "measured_gain": trial.gain}
    if choices:
        round_record["choices"] = choices
    return {"line": round_record, "matrix": matrix}
