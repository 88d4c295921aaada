"""What the server sees where a transform shows it sums alone: of updates, of messages and of measurements.

A method says which entries of its clients' messages are needed as sums (`Method.message_sums`). All
entries of an answer are added up in one sum, so that the same clients are in all of them.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch

from fedld.aggregation import Candidates, Measured, Trial, Vote
from fedld.aggregation.measured import LARGEST_LOSS
from fedld.engine.jobs import Setup
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Messages, MessageSum, Replies
from fedld.methods.start import START_SUMS
from fedld.transforms import BUFFERS, PARAMETERS, UPDATE_ENTRIES, SummedEntry, Total, UpdateTransform

FEATURE_SUMS = {
    "sums": MessageSum(2.0**16, weighted=False, per_sample=True),
    "count": MessageSum(1.0, weighted=False, per_sample=True),
}
"""What clients send of the inputs of a head that standardises them."""


def weights_of(setup: Setup, clients: Collection[str]) -> dict[str, float]:
    """Give how much each client counts: its samples, or 1 where clients count alike."""
    by_size = setup.method.client_weights == "size"
    return {name: float(setup.sizes[name]) if by_size else 1.0 for name in clients}


def entries_of(setup: Setup, sums: Mapping[str, MessageSum]) -> dict[str, SummedEntry]:
    """Give how entries are added up in this run: bounds per sample hold for the largest client."""
    largest = max(setup.sizes.values())
    return {
        key: SummedEntry(one.bound * (largest if one.per_sample else 1), one.weighted)
        for key, one in sums.items()
    }


def add_up(
    transform: UpdateTransform,
    messages: Mapping[str, Tree],
    weights: Mapping[str, float],
    entries: Mapping[str, SummedEntry],
) -> Total:
    """Add up messages of one form.

    Args:
        transform: What adds them up.
        messages: By client.
        weights: How much each client counts.
        entries: How each entry is added up; others are left out.

    Returns:
        The sums.

    Raises:
        FedLDError: A client's message has another form than the others'.
    """
    forms = {
        name: {key: tuple(message[key].shape) for key in entries if key in message}
        for name, message in messages.items()
    }
    first = next(iter(forms.values()))
    for name, form in forms.items():
        if form != first:
            raise FedLDError(f"client '{name}' sent a message of another form than others: no sum")
    summed = {name: {key: message[key] for key in first} for name, message in messages.items()}
    return transform.total(summed, {name: weights[name] for name in summed}, entries)


def sum_of_messages(setup: Setup, messages: Mapping[str, Tree], what: str) -> Messages:
    """Give the sum of the messages of an exchange without training, as that of one sender.

    Clients that send nothing (the server has their sums) are in no sum. Where others have sent theirs before
    and too few are left for a sum, they wait for a later round.
    """
    transform = setup.transforms.sums_only
    assert transform is not None
    sums = {"method": setup.method.message_sums, "features": FEATURE_SUMS, "closed": START_SUMS}[what]
    senders = {name: message for name, message in messages.items() if message}
    if not senders or transform.clients[0] > len(senders) < len(messages):
        return Messages(clients=(), rows=[], sizes=(), messages=[], summed=True)
    entries = entries_of(setup, sums)
    total = add_up(transform, senders, weights_of(setup, senders), entries)
    return Messages(
        clients=(transform.name,),
        rows=[setup.rows[name] for name in total.clients],
        sizes=(total.weight,),
        messages=[_as_sent(total.means(entries), senders)],
        summed=True,
    )


def _as_sent(means: Tree, messages: Mapping[str, Tree]) -> Tree:
    """Give sums the number types of the clients' messages."""
    form = next(iter(messages.values()))
    return {key: value.to(form[key].dtype) for key, value in means.items()}


def sum_of_updates(
    setup: Setup, updates: Mapping[str, torch.Tensor], messages: Mapping[str, Tree]
) -> tuple[Replies, tuple[str, ...]]:
    """Give what the method sees of a round's updates, and the clients that are in the sum."""
    layout, transform = setup.layout, setup.transforms.sums_only
    assert transform is not None
    method_entries = entries_of(setup, setup.method.message_sums)
    entries = {**UPDATE_ENTRIES, **method_entries}
    whole = {
        name: {
            PARAMETERS: layout.shared_parameters(row),
            BUFFERS: layout.shared_buffers(row),
            **{key: messages[name][key] for key in method_entries if key in messages[name]},
        }
        for name, row in updates.items()
    }
    total = add_up(transform, whole, weights_of(setup, whole), entries)
    means = _as_sent(total.means(entries), whole)
    mean = torch.zeros(1, layout.size)
    layout.shared_parameters(mean).copy_(means.pop(PARAMETERS))
    layout.shared_buffers(mean).copy_(means.pop(BUFFERS))
    replies = Replies(
        clients=(transform.name,),
        rows=[setup.rows[name] for name in total.clients],
        sizes=(total.weight,),
        messages=[means],
        layout=layout,
        updates=mean,
        steps=(0.0,),
        summed=True,
    )
    return replies, total.clients


def choose_by_sums(
    setup: Setup, rule: Measured, candidates: Candidates, votes: Mapping[str, Vote | str]
) -> Trial:
    """Choose among candidate steps by sums over the clients' votes.

    A client whose measurement cannot count is left out before the sum, as a site itself would do.
    """
    transform, count = setup.transforms.sums_only, len(candidates.coefficients)
    assert transform is not None
    weights = weights_of(setup, votes)
    left_out: dict[str, str] = {}
    messages: dict[str, Tree] = {}
    for name, vote in votes.items():
        problem = vote if isinstance(vote, str) else vote.problem(count)
        if isinstance(vote, Vote) and problem is None:
            spread = torch.from_numpy(weights[name] * vote.variances)
            messages[name] = {"losses": torch.tensor(vote.losses, dtype=torch.float64), "spread": spread}
        else:
            left_out[name] = str(problem)
    if len(messages) < transform.clients[0]:
        return rule.choose_by_sums(np.full(count, np.nan), np.full(count, np.nan), 0.0, left_out)
    largest = max(weights.values())
    entries = {"losses": SummedEntry(LARGEST_LOSS), "spread": SummedEntry(largest * LARGEST_LOSS**2)}
    total = add_up(transform, messages, weights, entries)
    heard = total.weight / sum(weights.values())
    losses, variances = total.sums["losses"] / total.weight, total.sums["spread"] / total.weight**2
    return rule.choose_by_sums(losses.numpy(), variances.numpy(), heard, left_out)
