"""What the server sees where a transform hides single updates: sums of updates, messages and measurements.

A method says which entries of its clients' messages are needed as sums (`Method.message_sums`). All
entries of an answer are added up in one sum, so that the same clients are in all of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedld.aggregation import Candidates, CountSketch, GramRule, HiddenUpdates, Measured, Trial, Vote
from fedld.aggregation.measured import LARGEST_LOSS
from fedld.engine.jobs import HeldVote, Setup
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Messages, MessageSum, Method, Replies
from fedld.methods.start import START_SUMS
from fedld.tasks import Tally
from fedld.transforms import (
    BUFFERS,
    PARAMETERS,
    UPDATE_ENTRIES,
    Combination,
    CombinedTotal,
    SummedEntry,
    Total,
)

FEATURE_SUMS = {
    "sums": MessageSum(2.0**16, weighted=False, per_sample=True),
    "count": MessageSum(1.0, weighted=False, per_sample=True),
}
"""What clients send of the inputs of a head that standardises them, and of trained layers."""

TRAINING = "training"
"""The entry of what clients measure of their training."""

TRAINING_SUMS = {TRAINING: MessageSum(2.0**10, weighted=False, per_sample=True)}
"""Weight times training loss; then, where they are measured, loss and count before and after training."""

Adder = Callable[[Mapping[str, Tree], Mapping[str, float], Mapping[str, SummedEntry]], Total]
"""Adds up messages by client: (messages, weights, how each entry is added up) -> the sums."""

Combiner = Callable[[Mapping[str, Tree], Mapping[str, float], Mapping[str, SummedEntry]], CombinedTotal]
"""Combines updates that clients keep: as `Adder`, with the rule's coefficients for the parameters."""


def weight_of(method: Method, samples: int) -> float:
    """Give how much a client counts: its samples, or 1 where clients count alike."""
    return float(samples) if method.client_weights == "size" else 1.0


def weights_of(setup: Setup, clients: Collection[str]) -> dict[str, float]:
    """Give how much each client counts."""
    return {name: weight_of(setup.method, setup.sizes[name]) for name in clients}


def entries_of(sums: Mapping[str, MessageSum], largest: int) -> dict[str, SummedEntry]:
    """Give how entries are added up in a run of which the largest client has so many samples."""
    return {
        key: SummedEntry(entry.bound * (largest if entry.per_sample else 1), entry.weighted)
        for key, entry in sums.items()
    }


def update_entries(method: Method, largest: int) -> dict[str, SummedEntry]:
    """Give how an update and the method's message beside it are added up."""
    return {**UPDATE_ENTRIES, **entries_of({**method.message_sums, **TRAINING_SUMS}, largest)}


def prepared_entries(method: Method, what: str, largest: int) -> dict[str, SummedEntry]:
    """Give how the messages of an exchange without training are added up."""
    sums = {
        "method": method.message_sums,
        "features": FEATURE_SUMS,
        "centres": FEATURE_SUMS,
        "closed": START_SUMS,
    }
    return entries_of(sums[what], largest)


def vote_entries(method: Method, largest: int) -> dict[str, SummedEntry]:
    """Give how votes on candidate steps are added up."""
    weight = weight_of(method, largest)
    return {"losses": SummedEntry(LARGEST_LOSS), "spread": SummedEntry(weight * LARGEST_LOSS**2)}


def update_message(setup: Setup, row: Tensor, message: Tree) -> Tree:
    """Give what is summed of a training: update, buffers, losses, and what the method needs as sums."""
    layout, keys = setup.layout, (*setup.method.message_sums, *TRAINING_SUMS)
    return {
        PARAMETERS: layout.shared_parameters(row),
        BUFFERS: layout.shared_buffers(row),
        **{key: message[key] for key in keys if key in message},
    }


def training_entry(weight: float, train_loss: float, tallies: Sequence[Tally | None]) -> Tensor:
    """Give the entry of a client's losses in training; one that is not finite or very large is bounded.

    Args:
        weight: How much the client counts.
        train_loss: Its mean loss while it trained.
        tallies: Of the incoming model and of the trained one, if they were measured.
    """
    numbers = [weight * _bounded(train_loss)]
    for tally in tallies:
        if tally is not None:
            numbers += [tally.count * _bounded(tally.loss / max(tally.count, 1)), float(tally.count)]
    return torch.tensor(numbers, dtype=torch.float64)


def _bounded(loss: float) -> float:
    bound = TRAINING_SUMS[TRAINING].bound
    return min(max(loss, -bound), bound) if loss == loss else bound


@dataclass(frozen=True)
class TrainingLosses:
    """Losses of a round's clients on their training samples, as means over all of them.

    Attributes:
        train: While they trained, weighted as the clients are; None where no client sent it.
        before: Of the incoming model; None where it was not measured.
        after: Of the models that they trained.
    """

    train: float | None = None
    before: float | None = None
    after: float | None = None


def training_losses(total: Total) -> TrainingLosses:
    """Give the clients' mean losses from their sum."""
    if TRAINING not in total.sums:
        return TrainingLosses()
    train, *measured = total.sums[TRAINING].tolist()
    sums = zip(measured[::2], measured[1::2], strict=True)
    return TrainingLosses(train / total.weight, *(loss / count if count else None for loss, count in sums))


def vote_message(vote: Vote, weight: float) -> Tree:
    """Give what is summed of a vote on candidate steps."""
    return {
        "losses": torch.tensor(vote.losses, dtype=torch.float64),
        "spread": torch.from_numpy(weight * vote.variances),
    }


def add_up(
    adder: Adder,
    messages: Mapping[str, Tree],
    weights: Mapping[str, float],
    entries: Mapping[str, SummedEntry],
) -> Total:
    """Add up messages of one form.

    Args:
        adder: What adds them up.
        messages: By client.
        weights: How much each client counts.
        entries: How each entry is added up; others are left out.

    Returns:
        The sums.

    Raises:
        FedLDError: A client's message has another form than the others'.
    """
    form = check_forms(messages, entries)
    summed = {name: {key: message[key] for key in form} for name, message in messages.items()}
    return adder(summed, {name: weights[name] for name in summed}, entries)


def check_forms(messages: Mapping[str, Tree], entries: Mapping[str, SummedEntry]) -> dict[str, Sequence[int]]:
    """Give the shapes of the summed entries, which all messages must have.

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
    return dict(first)


def sum_of_messages(setup: Setup, adder: Adder, messages: Mapping[str, Tree], what: str) -> Messages:
    """Give the sum of the messages of an exchange without training, as that of one sender.

    Clients that send nothing (the server has their sums) are in no sum. Where others have sent theirs before
    and too few are left for a sum, they wait for a later round.
    """
    transform = setup.transforms.sums_only
    assert transform is not None
    senders = {name: message for name, message in messages.items() if message}
    if not senders or transform.clients[0] > len(senders) < len(messages):
        return Messages(clients=(), rows=[], sizes=(), messages=[], summed=True)
    entries = prepared_entries(setup.method, what, max(setup.sizes.values()))
    total = add_up(adder, senders, weights_of(setup, senders), entries)
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
    setup: Setup, adder: Adder, updates: Mapping[str, Tensor], messages: Mapping[str, Tree]
) -> tuple[Replies, Total]:
    """Give what the method sees of a round's updates, and the sums over clients that it comes from."""
    whole, entries = _update_messages(setup, updates, messages)
    total = add_up(adder, whole, weights_of(setup, whole), entries)
    return _summed_replies(setup, total, _as_sent(total.means(entries), whole)), total


def combined_updates(
    setup: Setup,
    combiner: Combiner | None,
    updates: Mapping[str, torch.Tensor],
    messages: Mapping[str, Tree],
) -> tuple[Replies, CombinedTotal]:
    """Give what the method sees of updates that its rule combines by their Gram matrix, which is opened.

    Args:
        setup: The run.
        combiner: What combines updates that the clients keep; None where the transform does.
        updates: By client.
        messages: What each client says to the method beside its update.

    Returns:
        The replies, and what was opened.
    """
    transform, method = setup.transforms.sums_only, setup.method
    assert transform is not None
    whole, entries = _update_messages(setup, updates, messages)
    check_forms(whole, entries)
    weights = weights_of(setup, whole)
    if combiner is None:
        by = Combination(coefficients=hidden_updates(method, tuple(whole)).coefficients, sketch=count_sketch)
        total = transform.combine(whole, weights, entries, by)
    else:
        total = combiner(whole, weights, entries)
    hidden = hidden_updates(method, total.clients)
    entries = {**entries, PARAMETERS: replace(entries[PARAMETERS], weighted=False)}
    means = _as_sent(total.means(entries), whole)
    sketch = CountSketch(total.length, total.seed)
    combined = hidden.aggregate(means[PARAMETERS], total.matrix, total.shares, sketch)
    return replace(_summed_replies(setup, total, means), combined=combined), total


def hidden_updates(method: Method, clients: Sequence[str]) -> HiddenUpdates:
    """Give the method's rule for the updates of some clients that it does not see.

    Raises:
        FedLDError: The rule needs more than inner products.
    """
    if not isinstance(method.rule, GramRule):
        raise FedLDError(f"rule '{method.rule.name}' needs more than inner products of updates")
    return HiddenUpdates(rule=method.rule, clients=tuple(clients), max_weight=method.max_weight)


def count_sketch(vector: npt.NDArray[np.floating], length: int, seed: int) -> npt.NDArray[np.floating]:
    """Give the public sketch of a vector."""
    sketch: npt.NDArray[np.floating] = CountSketch(length, seed)(torch.from_numpy(vector)[None])[0].numpy()
    return sketch


def _update_messages(
    setup: Setup, updates: Mapping[str, torch.Tensor], messages: Mapping[str, Tree]
) -> tuple[dict[str, Tree], dict[str, SummedEntry]]:
    """Put updates and what the method needs of messages together, and say how each entry is added up."""
    whole = {name: update_message(setup, row, messages[name]) for name, row in updates.items()}
    return whole, update_entries(setup.method, max(setup.sizes.values()))


def _summed_replies(setup: Setup, total: Total, means: Tree) -> Replies:
    """Give the replies of a round as those of one sender."""
    layout, transform = setup.layout, setup.transforms.sums_only
    assert transform is not None
    row = torch.zeros(1, layout.size)
    layout.shared_parameters(row).copy_(means[PARAMETERS])
    layout.shared_buffers(row).copy_(means[BUFFERS])
    return Replies(
        clients=(transform.name,),
        rows=[setup.rows[name] for name in total.clients],
        sizes=(total.weight,),
        messages=[{key: means[key] for key in setup.method.message_sums if key in means}],
        layout=layout,
        updates=row,
        steps=(0.0,),
        summed=True,
    )


def choose_by_sums(
    setup: Setup,
    adder: Adder,
    rule: Measured,
    candidates: Candidates,
    votes: Mapping[str, Vote | HeldVote | str],
) -> Trial:
    """Choose among candidate steps by sums over the clients' votes.

    A client with a measurement that cannot count is left out before the sum, as a site itself does.
    """
    transform, count = setup.transforms.sums_only, len(candidates.coefficients)
    assert transform is not None
    weights = weights_of(setup, votes)
    left_out: dict[str, str] = {}
    messages: dict[str, Tree] = {}
    for name, vote in votes.items():
        if isinstance(vote, HeldVote):
            messages[name] = {key: torch.zeros(count, dtype=torch.float64) for key in ("losses", "spread")}
            continue
        problem = vote if isinstance(vote, str) else vote.problem(count)
        if isinstance(vote, Vote) and problem is None:
            messages[name] = vote_message(vote, weights[name])
        else:
            left_out[name] = str(problem)
    if len(messages) < transform.clients[0]:
        return rule.choose_by_sums(np.full(count, np.nan), np.full(count, np.nan), 0.0, left_out)
    entries = vote_entries(setup.method, max(setup.sizes.values()))
    total = add_up(adder, messages, weights, entries)
    heard = total.weight / sum(weights.values())
    losses, variances = total.sums["losses"] / total.weight, total.sums["spread"] / total.weight**2
    return rule.choose_by_sums(losses.numpy(), variances.numpy(), heard, left_out)
