"""Cross evaluation for the loss decomposition (Eq. 2): M[j, i] = L_j(w_i) and L_j(w).

No loss is measured twice: L_i(w_i) comes with the client's training, and L_j(w) is the loss that client j
measures before it trains in the next round.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from fedld.analysis import decompose
from fedld.engine.experiment import Experiment
from fedld.engine.records import Line
from fedld.engine.work import Incoming, LossJob, Setup, Sums, Trained

LOSS_CHUNK = 2048


@dataclass(frozen=True)
class Member:
    """A client that took part in a round: where its update lies, and what it started from and replied."""

    client: int
    slot: int
    incoming: Incoming
    trained: Trained


def due(experiment: Experiment, round_: int) -> bool:
    """Whether a round is decomposed: every N-th, and the first and last."""
    n = experiment.decompose
    return n > 0 and (round_ in (1, experiment.rounds) or round_ % n == 0)


def cross_jobs(setup: Setup, round_: int, members: list[Member]) -> list[LossJob]:
    """Every member's model, as it was before aggregation, on every client's samples."""
    jobs = []
    for member in members:
        known = _exact_with_training(setup.experiment)
        others = [j for j in range(len(setup.sizes)) if not (known and j == member.client)]
        model = member.incoming
        if member.trained.kept:  # its state holds the private parameters it trained, not those it was sent
            sent = {key: value for key, value in model.message.items() if key != "private"}
            model = replace(model, state_round=round_, message=sent)
        jobs += [LossJob(group, member.slot, model) for group in _groups(others, setup.sizes)]
    return jobs


def cross_matrix(setup: Setup, members: list[Member], jobs: list[LossJob], results: list[Any]) -> Line:
    """M and, for an estimate, the standard errors of its entries."""
    columns = {member.client: k for k, member in enumerate(members)}
    cross = np.full((len(setup.sizes), len(members)), np.nan)
    errors = np.full_like(cross, np.nan)
    for k, member in enumerate(members):
        if _exact_with_training(setup.experiment) and member.trained.after is not None:
            cross[member.client, k] = member.trained.after.mean
    for job, result in zip(jobs, results, strict=True):
        k = columns[cast(Incoming, job.incoming).client]
        for j, sums in zip(job.clients, cast(list[Sums], result), strict=True):
            cross[j, k], errors[j, k] = sums.mean, sums.standard_error
    estimated = setup.experiment.decompose_samples is not None
    return {
        "sampled": [member.client for member in members],
        "cross_loss": cross.tolist(),
        "standard_errors": errors.tolist() if estimated else None,
    }


def global_jobs(setup: Setup, training: set[int]) -> list[LossJob]:
    """The global model on the clients whose loss will not come with their training of the next round."""
    layout = setup.layout
    private = layout.trainable - layout.shared + layout.size - layout.shared_end
    known = training if _exact_with_training(setup.experiment) and not private else set()
    return [LossJob((j,)) for j in range(len(setup.sizes)) if j not in known]


def decomposition(setup: Setup, matrix: Line, losses: dict[int, Sums]) -> tuple[Line, Line]:
    """The terms of Eq. 2 for the round's line, and the whole matrix for its own file."""
    measured = [losses[j] for j in range(len(setup.sizes))]
    global_losses = [sums.mean for sums in measured]
    errors = [sums.standard_error for sums in measured] if matrix["standard_errors"] else None
    terms = decompose(
        matrix["cross_loss"],
        global_losses,
        setup.sizes,
        matrix["sampled"],
        cross_error=matrix["standard_errors"],
        global_error=errors,
    )
    line = {
        "local_loss": terms.local,
        "shift_loss": terms.shift,
        "aggregation_loss": terms.aggregation,
        "global_loss": terms.total,
        "identity_error": terms.identity_error,
    }
    if terms.standard_error is not None:
        line |= {f"{term}_loss_error": error for term, error in terms.standard_error.items()}
    names = [client.name for client in setup.federation.clients]
    facts = {"clients": names, "sizes": setup.sizes, "global_losses": global_losses, "global_errors": errors}
    return line, {**matrix, **facts}


def _exact_with_training(experiment: Experiment) -> bool:
    return experiment.client_losses and experiment.decompose_samples is None


def _groups(clients: list[int], sizes: list[int]) -> list[tuple[int, ...]]:
    """Clients in groups of about equal work, so that a few models still keep all workers busy."""
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    for j in clients:
        group.append(j)
        if sum(sizes[k] for k in group) >= LOSS_CHUNK or j == clients[-1]:
            groups.append(tuple(group))
            group = []
    return groups
