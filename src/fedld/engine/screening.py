"""Screening: which replies of a round are refused before a method sees them, and why.

What a refused client sent reaches nothing: neither the global model and its buffers nor the server's state or
the client's own state in the next round.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedld.aggregation import statistic_problem, too_long
from fedld.layout import Layout, Tree
from fedld.methods import Method, Server


def refusals(
    method: Method, layout: Layout, updates: Mapping[str, Tensor], messages: Mapping[str, Tree]
) -> dict[str, str]:
    """Find the replies of a round that cannot be used.

    Args:
        method: Its `max_update_ratio` bounds the updates' lengths.
        layout: Layout of the updates.
        updates: A vector per client.
        messages: What each of these clients sent beside its update.

    Returns:
        Why a client is refused, by name; lengths are compared among the clients without another fault.
    """
    refused: dict[str, str] = {}
    lengths: dict[str, float] = {}
    for client, update in updates.items():
        if problem := _problem(layout, update, messages[client]):
            refused[client] = problem
        else:
            lengths[client] = _length(layout.shared_parameters(update))
    return refused | too_long(np.array([*lengths.values()]), [*lengths], method.max_update_ratio)


def unexplained(
    method: Method,
    server: Server,
    layout: Layout,
    updates: Mapping[str, Tensor],
    messages: Mapping[str, Tree],
) -> dict[str, str]:
    """Find the clients whose update and message do not belong together.

    Args:
        method: Its `update_problem` decides.
        server: The server's state before the round.
        layout: Layout of the updates.
        updates: A vector per client, as the client made it.
        messages: What each of these clients sent beside its update.

    Returns:
        Why a client is refused, by name.
    """
    found = {c: method.update_problem(server, layout, update, messages[c]) for c, update in updates.items()}
    return {client: problem for client, problem in found.items() if problem is not None}


def long_messages(method: Method, messages: Mapping[str, Tree]) -> dict[str, str]:
    """Find the clients whose preparation is too long by one of the method's `prepared_lengths`."""
    refused: dict[str, str] = {}
    found = {client: method.prepared_lengths(message) for client, message in messages.items()}
    for key in sorted({key for lengths in found.values() for key in lengths}):
        lengths = {client: one[key] for client, one in found.items() if key in one}
        refused |= too_long(np.array([*lengths.values()]), [*lengths], method.max_update_ratio, what=key)
    return refused


def _problem(layout: Layout, update: Tensor, message: Tree) -> str | None:
    """Why a reply cannot be used, whatever the others sent; None if it can."""
    for key, value in message.items():
        if value.is_floating_point() and key != "statistics" and not bool(value.isfinite().all()):
            return f"its message '{key}' is not finite"
    length = _length(layout.shared_parameters(update))
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


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
