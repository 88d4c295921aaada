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
    method: Method,
    layout: Layout,
    updates: Mapping[str, Tensor],
    messages: Mapping[str, Tree],
    server: Server | None,
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
    """Find the clients whose preparation is too long by one of the method's `prepared_lengths`."""
    refused: dict[str, str] = {}
    if method.max_update_ratio is None:
        return refused
    found = {client: method.prepared_lengths(message) for client, message in messages.items()}
    for key in sorted({key for lengths in found.values() for key in lengths}):
        lengths = {client: one[key] for client, one in found.items() if key in one}
        refused |= too_long(np.array([*lengths.values()]), [*lengths], method.max_update_ratio, what=key)
    return refused


def _problem(layout: Layout, update: Tensor, length: float, message: Tree) -> str | None:
    """Why a reply cannot be used, whatever the others sent; None if it can."""
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
