"""What is measured of models: the global one and the personalised ones on test sets, and for the loss
decomposition (Eq. 2) M[j, i] = L_j(w_i) and L_j(w).

No loss is measured twice: L_i(w_i) comes with the client's training, and L_j(w) is the loss that client j
measures before it trains in the next round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from fedld.analysis import decompose_line
from fedld.config.experiment import Experiment
from fedld.data import Federation
from fedld.data.table import read_column
from fedld.engine.jobs import (
    Incoming,
    Job,
    LossJob,
    Personal,
    PersonalJob,
    Setup,
    TestJob,
    Trained,
    TrainJob,
)
from fedld.records.schema import CrossLine, CrossMatrix, Evaluation, Predictions, Terms
from fedld.records.tables import columns_table
from fedld.tasks import Tally
from fedld.tasks.base import defined, worst_client
from fedld.tasks.measure import EMPTY, SampleTally, Scores, finite_values, merged
from fedld.tasks.scores import calibration, confusion

TEST_CHUNK = 512
LOSS_CHUNK = 2048


def evaluation_jobs(setup: Setup, round_: int, incoming: Callable[[str], Incoming]) -> list[Job]:
    """Make the jobs that evaluate the models after a round, where it is due.

    `incoming` tells what a client holds.

    A client that has nothing of its own yet holds the global model, which is measured once for all of them.
    """
    evaluated = setup.method.has_global and _due(setup.experiment, round_, setup.experiment.eval_every)
    tests = len(setup.federation.test) if evaluated else 0
    jobs: list[Job] = [TestJob(s, min(s + TEST_CHUNK, tests)) for s in range(0, tests, TEST_CHUNK)]
    if evaluated and setup.experiment.validation is not None:
        jobs += [LossJob(clients=group, validation=True) for group in _groups(list(setup.sizes), setup.sizes)]
    models = [incoming(client) for client in setup.sizes] if _personal_due(setup, round_) else []
    away = {client.name for client in setup.federation.clients if client.elsewhere}
    personal = [
        model for model in models if model.state_round or model.message or model.client in away or not tests
    ]
    return jobs + [PersonalJob(model) for model in personal]


def _due(experiment: Experiment, round_: int, every: int) -> bool:
    return not round_ % every or round_ == experiment.rounds


def _personal_due(setup: Setup, round_: int) -> bool:
    experiment = setup.experiment
    every = experiment.personal_every or experiment.eval_every
    single = setup.transforms.sums_only is None  # else the server learns of no single client's measures
    return single and setup.personalised and _due(experiment, round_, every)


def evaluation_line(
    setup: Setup, round_: int, pairs: Sequence[tuple[Job, Any]], logits: Tensor
) -> Evaluation:
    """Compute the scores of the models after a round: the global one, and apart, the personalised ones."""
    personal = {job.incoming.client: result for job, result in pairs if isinstance(job, PersonalJob)}
    if not any(isinstance(job, TestJob) for job, _ in pairs):
        return _personal(setup, [*personal.values()])
    task = setup.task
    labels = setup.test_labels
    test = task.sample_tally(logits, labels)
    parts = {name: task.sample_tally(logits[at], labels[at]) for name, at in setup.client_tests.items()}
    by_client = {client: _brief(setup, part) for client, part in parts.items()}
    line: Evaluation = {"test": task.scores(test, setup.metrics) | worst_client(task.measures, by_client)}
    if by_client:
        line["client_tests"] = by_client
    if _personal_due(setup, round_):
        shared = [personal.get(name) or Personal(test, parts.get(name)) for name in setup.sizes]
        line |= _personal(setup, shared)
    return line if setup.experiment.validation is None else line | _validation(setup, pairs)


def _brief(setup: Setup, tally: SampleTally) -> Scores:
    """Compute the scores in the measures that sums give, and in those that users added."""
    further = {name: defined(measure, tally) for name, measure in setup.metrics.items()}
    return setup.task.scores(tally.without_samples()) | further


def predictions(setup: Setup, logits: Tensor) -> Predictions:
    """Compute the confusion matrix and calibration of the final global model."""
    labels = setup.test_labels
    diagram = calibration(logits, labels)
    return {
        "classes": list(setup.federation.classes),
        "confusion": confusion(logits, labels).tolist(),
        "calibration": {
            "confidence": diagram.confidence.tolist(),
            "accuracy": diagram.accuracy.tolist(),
            "count": diagram.count.tolist(),
            "ece": diagram.ece,
        },
    }


def picture_predictions(setup: Setup, logits: Tensor) -> str:
    """Make predictions.csv: a row for every test picture, with the final global model's probabilities.

    `name` is the file where the data have files, else the picture's place in the data. `site` is the one that
    has the picture, and `patient` its patient, where the data name them.
    """
    f = setup.federation
    patients = read_column(f.folder, "patient")
    names, sites = origin_of_tests(f)
    columns = {"name": names, "site": sites}
    if patients is not None:
        columns["patient"] = [str(name) for name in patients[f.test]]
    task = setup.task
    columns |= task.targets(f.labels[f.test], f.classes) | task.predicted(logits, f.classes)
    columns |= task.cases(logits, f.labels[f.test], f.classes)
    return columns_table(columns)


def origin_of_tests(federation: Federation) -> tuple[list[str], list[str]]:
    """Name and site of every picture of the global test set; the site is "" where it is not known."""
    files, sites = (read_column(federation.folder, name) for name in ("file", "site"))
    test = federation.test
    owner = np.full(len(federation.labels), "", object) if sites is None else sites.astype(object)
    if sites is None or len(federation.clients) > 1:  # pooled data keep the sites that they came from
        for client in federation.clients:
            owner[client.test] = client.name
    names = test if files is None else files[test]
    return [str(name) for name in names], [str(name) for name in owner[test]]


def output_names(federation: Federation) -> tuple[str, ...]:
    """Name the outputs of a model."""
    return federation.classes


def _validation(setup: Setup, pairs: Sequence[tuple[Job, Any]]) -> Evaluation:
    """Give the global model on all images that the clients set aside: their tallies are merged.

    A site with few images, or one that is away, has an empty tally.
    """
    parts = [
        tally for job, tallies in pairs if isinstance(job, LossJob) and job.validation for tally in tallies
    ]
    whole = merged(parts)
    if not whole.count:
        return {"validation": {"count": 0}} if parts else {}
    return {"validation": setup.task.scores(whole)}


def _personal(setup: Setup, results: list[Personal]) -> Evaluation:
    """Average the personalised models' scores over clients, on the global test set and on their own.

    A site far away measures its model on its own test set only: the global one is the server's.
    """
    line: Evaluation = {}
    task = setup.task
    if tests := [task.scores(result.test.without_samples()) for result in results if result.test is not None]:
        line |= {"personal": _mean(tests), "personal_worst": _worst(setup, tests)}
    if local := [task.scores(result.own.without_samples()) for result in results if result.own is not None]:
        line["personal_own"] = _mean(local)
    return line


def _mean(clients: list[Scores]) -> Scores:
    """Compute the mean over clients of every measure; None where a client has no value.

    `count` is of clients.
    """
    means: Scores = {"count": len(clients)}
    for name in clients[0]:
        values = finite_values([scores[name] for scores in clients])
        if name != "count":
            means[name] = float(np.mean(values)) if len(values) == len(clients) else None
    return means


def _worst(setup: Setup, clients: list[Scores]) -> Scores:
    """Give the worst client's value of every measure; None where a client has no value.

    `count` is of clients.
    """
    worst: Scores = {"count": len(clients)}
    for name in clients[0]:
        values = finite_values([scores[name] for scores in clients])
        if name != "count":
            complete = len(values) == len(clients)
            worst[name] = setup.task.measure(name).worst_of(values) if complete else None
    return worst


def decomposition_due(experiment: Experiment, round_: int) -> bool:
    """Say whether a round is decomposed: every N-th, and the first and last."""
    n = experiment.decompose
    return n > 0 and (round_ in (1, experiment.rounds) or round_ % n == 0)


def cross_jobs(setup: Setup, training: Sequence[TrainJob], trained: Mapping[str, Trained]) -> list[LossJob]:
    """Measure the model of every client that trained, before aggregation, on every client's samples."""
    jobs = []
    skipped = _exact_with_training(setup.experiment)
    for job in training:
        client = job.incoming.client
        others = [name for name in setup.sizes if not (skipped and name == client)]
        model = after_training(job, trained[client])
        jobs += [
            LossJob(clients=group, slot=job.slot, incoming=model) for group in _groups(others, setup.sizes)
        ]
    return jobs


def after_training(job: TrainJob, trained: Trained) -> Incoming:
    """Give what a client holds after its training: its new state has the private parameters it trained."""
    if not trained.has_state:
        return job.incoming
    sent = {key: value for key, value in job.incoming.message.items() if key != "private"}
    return replace(job.incoming, state_round=job.round, message=sent)


def cross_matrix(
    setup: Setup, trained: Mapping[str, Trained], pairs: Sequence[tuple[LossJob, Any]]
) -> CrossMatrix:
    """Compute M and, for an estimate, the standard errors of its entries.

    a column for every client that trained.
    """
    rows, columns = setup.rows, {client: k for k, client in enumerate(trained)}
    cross = np.full((len(rows), len(columns)), np.nan)
    errors = np.full_like(cross, np.nan)
    missing: set[str] = set()
    for client, k in columns.items():
        if _exact_with_training(setup.experiment) and (after := trained[client].after) is not None:
            cross[rows[client], k] = after.mean
    for job, result in pairs:
        k = columns[cast(Incoming, job.incoming).client]
        for client, sums in zip(job.clients, cast(list[Tally], result), strict=True):
            cross[rows[client], k], errors[rows[client], k] = sums.mean, sums.standard_error
            missing |= {client} if setup.sizes[client] and not sums.count else set()
    estimated = setup.experiment.decompose_samples is not None
    matrix: CrossMatrix = {
        "sampled": [rows[client] for client in trained],
        "cross_loss": cross.tolist(),
        "standard_errors": errors.tolist() if estimated else None,
    }
    if missing:
        matrix["not_measured"] = [client for client in rows if client in missing]
    return matrix


def global_jobs(setup: Setup, training: set[str]) -> list[LossJob]:
    """Give the global model on the clients that will not measure it in their training of the next round.

    A client that starts from a model of its own measures that one, not the global model. A method without a
    global model has no L(w): its decomposition has the local and the shift term only.
    """
    if not setup.method.has_global:
        return []
    with_training = _exact_with_training(setup.experiment) and setup.method.starts_from_global
    measured = training if with_training and not setup.layout.private_size else set()
    return [LossJob(clients=(client,)) for client in setup.sizes if client not in measured]


def decomposition(
    setup: Setup, round_: int, matrix: CrossMatrix, losses: Mapping[str, Tally]
) -> tuple[Terms, CrossLine]:
    """Give the terms of Eq. 2 for the round's line, and the whole matrix for its own file.

    Clients that were away, or failed, before all their losses were measured are named in both. The terms are
    over the other clients; there are none if no client that trained was measured.
    """
    tallies = [losses.get(client, EMPTY) for client in setup.sizes]
    has_global, estimated = setup.method.has_global, matrix["standard_errors"] is not None
    missing = set(matrix.get("not_measured", ()))
    if has_global:
        pairs = zip(setup.sizes.items(), tallies, strict=True)
        missing |= {client for (client, size), sums in pairs if size and not sums.count}
    line: CrossLine = {
        "round": round_,
        **matrix,
        "clients": list(setup.sizes),
        "sizes": list(setup.sizes.values()),
        "global_losses": [sums.mean for sums in tallies] if has_global else None,
        "global_errors": [sums.standard_error for sums in tallies] if has_global and estimated else None,
    }
    if missing:
        line["not_measured"] = [client for client in setup.sizes if client in missing]
    return _terms(line), line


def _terms(line: CrossLine) -> Terms:
    """Give the terms of a line of cross_loss.jsonl, and who is not in them."""
    fields: Terms = {"not_measured": line["not_measured"]} if "not_measured" in line else {}
    terms = decompose_line(line)
    if terms is None:
        return fields
    fields |= {
        "local_loss": terms.local,
        "shift_loss": terms.shift,
        "aggregation_loss": terms.aggregation,
        "global_loss": terms.total,
        "identity_error": terms.identity_error,
    }
    if (error := terms.standard_error) is not None:
        fields |= {
            "local_loss_error": error["local"],
            "shift_loss_error": error["shift"],
            "aggregation_loss_error": error["aggregation"],
            "total_loss_error": error["total"],
        }
    return fields


def _exact_with_training(experiment: Experiment) -> bool:
    exact = experiment.client_losses and experiment.decompose_samples is None
    return exact and not experiment.transform  # the model that arrives is not the one that was trained


def _groups(clients: list[str], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Give clients in groups of about equal work, so that a few models still keep all workers busy."""
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    for client in clients:
        group.append(client)
        if sum(sizes[name] for name in group) >= LOSS_CHUNK or client == clients[-1]:
            groups.append(tuple(group))
            group = []
    return groups
