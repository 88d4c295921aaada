"""Exchanges without training: before the first round, before each round's training, after the last round."""

from dataclasses import replace
from typing import Any

from fedld.config.experiment import Experiment
from fedld.engine.exchange import Exchange
from fedld.engine.jobs import PrepareJob
from fedld.engine.network import divided
from fedld.methods.moments import set_head
from fedld.methods.start import ClosedStart
from fedld.models import as_model, head_names
from fedld.models.standardise import moments
from fedld.records.schema import RoundLine


def standardises(experiment: Experiment) -> bool:
    """Whether the head's inputs are standardised; the moments of all records would have no epsilon."""
    return experiment.train == "head" and experiment.standardise and not experiment.dp


def standardise(exchange: Exchange) -> None:
    """Before the first round: the head's inputs get mean 0 and deviation 1 over all clients' images.

    Sums over images add up, so the clients' sums give the moments that pooled images would.
    """
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    messages, _ = exchange.gather([PrepareJob(0, exchange.incoming(c), "features") for c in setup.sizes])
    total, squares = messages.stack("sums").sum(0)
    shift, scale = moments(total, squares, messages.stack("count").sum())
    weights = state.server.weights.clone()
    for name, view in setup.layout.views(weights).items():
        if name.endswith((".shift", ".scale")):
            view.copy_(shift if name.endswith(".shift") else scale)
    state.server = replace(state.server, weights=weights)


def start_closed(exchange: Exchange) -> None:
    """Before the first round: the head begins at the ridge solution, scaled by the measured temperature."""
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    incoming = [exchange.incoming(client) for client in setup.sizes]
    sums, _ = exchange.gather([PrepareJob(0, one, "closed") for one in incoming])
    start = ClosedStart(sums.messages)
    asked = [replace(one, message={**one.message, **start.plan}) for one in incoming]
    errors, _ = exchange.gather([PrepareJob(0, one, "closed") for one in asked])
    head, choices = start.solve(errors.messages)
    names = head_names(as_model(divided(setup.experiment, setup.method, setup.federation)[1]))
    weights = set_head(state.server.weights, setup.layout, names, *head)
    # Some methods keep copies of the first weights, so their state is made anew.
    sizes = [client.size for client in setup.federation.clients]
    state.server = setup.method.init(weights, setup.layout, sizes)
    said = ", ".join(f"{name} {value:.3g}" for name, value in choices.items())
    exchange.progress({"event": "note", "text": f"the head starts at its closed form: {said}"})


def prepare_round(exchange: Exchange, sampled: list[str]) -> dict[str, Any]:
    """Before the training of methods that `prepare`; gives the results of clients that failed in it."""
    state = exchange.state
    jobs = [PrepareJob(state.round + 1, exchange.incoming(client)) for client in sampled]
    messages, missing = exchange.gather(jobs)
    state.server = exchange.setup.method.gather(state.server, messages)
    return missing


def calibrate(exchange: Exchange, line: RoundLine) -> None:
    """After the last round: all clients answer, the final model changes, `line` gets the bytes.

    The checkpoint of that round is from before it, so a run that is resumed calibrates again.
    """
    setup, state = exchange.setup, exchange.state
    exchange.publish()
    jobs = [PrepareJob(state.round + 1, exchange.incoming(client)) for client in setup.sizes]
    messages, _ = exchange.gather(jobs)
    state.server = setup.method.calibrate(state.server, messages)
    sent = exchange.settle()
    line["bytes_up"] += sent["bytes_up"]
    line["bytes_down"] += sent["bytes_down"]
