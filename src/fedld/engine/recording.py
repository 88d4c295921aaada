"""The records of a training round: one line for the round, one for every client."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedld.aggregation import Aggregate
from fedld.engine.jobs import Failure, Setup, Trained
from fedld.engine.summing import TrainingLosses
from fedld.local.client import MEASURED
from fedld.methods import Replies
from fedld.methods.base import shares
from fedld.records.schema import ClientLine, ConflictLine, Reason, RoundLine, Traffic, TrainingRecord

GRAM_CLIENTS = 100
"""A round's Gram matrix is written for at most so many clients: for 1,000 it would be 20 MB of text."""


def round_line(
    round_: int,
    replies: Replies,
    losses: TrainingLosses,
    combined: Aggregate,
    sent: Traffic,
    lines: list[ClientLine],
) -> RoundLine:
    """Give what the round did to the model, and the clients that it lacks: those that `lines` exclude."""
    line: RoundLine = {
        "round": round_,
        "clients": len(replies.rows),
        "train_loss": losses.train,
        "update_norm": float(combined.update.double().norm()),
        "norm_ratio": combined.report.norm_ratio,
        "cosine_to_average": combined.report.cosine,
        "buffer_disagreement": buffer_disagreement(replies),
        "bytes_up": sent["bytes_up"],
        "bytes_down": sent["bytes_down"],
    }
    if losses.before is not None:
        line["client_loss_before"] = losses.before
    if losses.after is not None:
        line["client_loss_after"] = losses.after
    if "measuring_seconds" in sent:
        line["measuring_seconds"] = sent["measuring_seconds"]
    if missing := {entry["client"]: entry["reason"] for entry in lines if "reason" in entry}:
        line["missing"] = missing
    return line


def mean_training_loss(setup: Setup, trained: Mapping[str, Trained]) -> float:
    """Give the mean of the clients' losses in training, weighted as the clients are."""
    p = shares([setup.sizes[name] for name in trained], setup.method.client_weights)
    losses = torch.tensor([one.metrics["train_loss"] for one in trained.values()], dtype=torch.float64)
    return mean_of_sent(p, losses)


def mean_of_sent(p: Tensor, values: Tensor) -> float:
    """Compute the weighted mean of the values that were sent; what a site keeps to itself is NaN.

    >>> mean_of_sent(torch.tensor([0.25, 0.25, 0.5]), torch.tensor([1.0, 3.0, torch.nan]))
    2.0
    """
    sent = ~values.isnan()
    return float(p @ values) if sent.all() else float(p[sent] @ values[sent] / p[sent].sum())


def client_lines(
    setup: Setup,
    round_: int,
    results: Mapping[str, Any],
    combined: Aggregate,
    summed: Collection[str] = (),
) -> list[ClientLine]:
    """Give one line per sampled client: also for those that were left out, with the reason.

    Of clients that are `summed` the server saw no single update: their lengths and angles are not known.
    """
    report = combined.report
    lines: list[ClientLine] = []
    place = {name: k for k, name in enumerate(report.clients)}
    for name, result in results.items():
        row, size = setup.rows[name], setup.sizes[name]
        line: ClientLine = {"round": round_, "client": name, "index": row, "size": size}
        if not setup.federation.client(name).untold:
            line["label_counts"] = setup.label_counts[name]
        if isinstance(result, Trained):
            line = {**line, **_training(setup, result)}
        if name in place:
            k = place[name]
            line |= {"update_norm": report.norms[k], "cosine_to_aggregate": report.cosines[k]}
        elif name not in summed:
            line["excluded"] = report.rejected.get(name) or exclusion(result)
            line["reason"] = reason(result)
        lines.append(line)
    return lines


def conflict_line(round_: int, replies: Replies, combined: Aggregate) -> ConflictLine:
    """Give the aggregation's report with its round and clients.

    The Gram matrix of at most `GRAM_CLIENTS` of them.

    Who is left out of the matrix is spread evenly, so that where all clients take part in every round, every
    round tells of the same ones.
    """
    report = combined.report
    count = len(report.clients)
    rows = np.linspace(0, count - 1, min(count, GRAM_CLIENTS)).round().astype(int).tolist()
    part = replace(report, gram=[[report.gram[i][j] for j in rows] for i in rows])
    line = cast(ConflictLine, part.to_json())  # a test holds the fields of both together
    names = [report.clients[i] for i in rows]
    return {**line, "round": round_, "sampled": replies.rows, "gram_clients": names}


def _training(setup: Setup, result: Trained) -> TrainingRecord:
    """Give what a client measured of its own training; its time alone where the server sees sums."""
    if not result.metrics:
        return {"seconds": result.seconds}
    line: TrainingRecord = {
        "steps": result.metrics["steps"],
        "train_loss": result.metrics["train_loss"],
        "lr": result.metrics["lr"],
        "seconds": result.seconds,
    }
    if result.before is not None:
        line["before"] = setup.task.scores(result.before)
    if result.after is not None:
        line["after"] = setup.task.scores(result.after)
    if further := {key: value for key, value in result.metrics.items() if key not in MEASURED}:
        line["metrics"] = further
    return line


def exclusion(result: Any) -> str:
    """Say why a client's reply is not used."""
    if isinstance(result, Failure):
        return result.error
    return "the update is not finite" if isinstance(result, Trained) else "what it sent is not finite"


def reason(result: Any) -> Reason:
    """Say why a client's reply is not used, in one word."""
    if isinstance(result, Failure):
        return result.reason
    return "rejected" if result.finite else "not finite"


def buffer_disagreement(replies: Replies) -> float | None:
    """Say how far clients' BatchNorm means lie apart, in units of the running standard deviation."""
    places = {e.name: slice(e.start, e.start + e.size) for e in replies.layout.entries if not e.private}
    means = [name for name in places if name.endswith("running_mean")]
    if not means or len(replies.clients) < 2:
        return None
    spreads = []
    for name in means:
        variance = replies.updates[:, places[name.replace("running_mean", "running_var")]]
        deviation = variance.mean(0).sqrt().clamp_min(1e-6)
        spreads.append((replies.updates[:, places[name]].std(0) / deviation).mean())
    return float(torch.stack(spreads).mean())
