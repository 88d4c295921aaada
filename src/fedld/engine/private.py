"""Differential privacy of a run: what must hold for its epsilon to be true, and every client's noise.

An epsilon covers the clients' updates over all rounds. So everything else that would depend on single
training records is refused: losses on them, methods that send more than trained weights, batch statistics.
"""

from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

from torch import nn

from fedld.aggregation import Measured
from fedld.config.experiment import Experiment
from fedld.config.resolve import make_privacy
from fedld.data import Federation
from fedld.errors import FedLDError
from fedld.local import Objective
from fedld.local.objectives import MarginLog, SpectralDecoupling, Threshold
from fedld.local.private import PrivateSteps
from fedld.methods import Method
from fedld.methods.feddyn import FedDyn
from fedld.methods.fedprox import FedProx
from fedld.methods.scaffold import Scaffold
from fedld.paths import make_folder
from fedld.privacy.accounting import NoisySteps, epsilon_of, noise_for
from fedld.privacy.budget import BudgetLedger

TRAINING_ALONE = (Method, FedProx, Scaffold, FedDyn)
"""Methods with a client side that uses samples in its noisy steps alone."""

PER_SAMPLE = (Objective, MarginLog, SpectralDecoupling, Threshold)
"""Objectives that are a mean over samples and use nothing else of the client."""


def private_steps(
    experiment: Experiment, method: Method, model: nn.Module, federation: Federation
) -> dict[str, PrivateSteps]:
    """Give every client's noisy steps, none where `dp` is not set.

    Raises:
        FedLDError: the run would tell more of single records than its epsilon says.
    """
    target = make_privacy(experiment)
    if (experiment.dp_budget is None) != (experiment.dp_ledger is None):
        raise FedLDError("dp_budget and dp_ledger belong together: the epsilon, and the folder it is kept in")
    if target is None:
        if experiment.dp_budget is not None:
            raise FedLDError("dp_budget bounds runs with dp: without noise there is no epsilon")
        return {}
    for problem in _problems(experiment, method, model, federation):
        raise FedLDError(f"dp: {problem}")
    steps = {}
    for client in federation.clients:
        rate = min(1.0, experiment.batch_size / client.size)
        per_epoch = max(1, round(client.size / experiment.batch_size))
        per_round = experiment.local_steps or experiment.local_epochs * per_epoch
        noise = noise_for(target.epsilon, target.delta, rate, per_round * experiment.rounds)
        steps[client.name] = PrivateSteps(noise=noise, clip=target.clip, rate=rate, steps=per_round)
    return steps


def _problems(
    experiment: Experiment, method: Method, model: nn.Module, federation: Federation
) -> Iterator[str]:
    """Say why the epsilon of a run would not be true."""
    name = experiment.method["name"]
    if experiment.dp_budget is not None and any(client.elsewhere for client in federation.clients):
        yield "sites keep their own budgets (epsilon in their policy.toml): no dp_budget across sites"
    plain = type(method)
    sends_more = plain.client_update not in [listed.client_update for listed in TRAINING_ALONE]
    if sends_more or plain.loss is not Method.loss or method.prepares or method.calibrates:
        yield f"method '{name}' uses clients' samples beside its training, which has no epsilon"
    if plain.federation is not Method.federation or not method.has_global:
        yield f"method '{name}' has no clients that send updates"
    if isinstance(method.rule, Measured):
        yield "rule 'measured' needs losses on clients' samples, which have no epsilon"
    if type(method.objective) not in PER_SAMPLE:
        kind = type(method.objective).__name__
        yield f"objective {kind} is not known to be a mean over samples that uses nothing else of the client"
    if experiment.client_losses or experiment.decompose or experiment.validation is not None:
        yield "losses on training samples have no epsilon: no client_losses, decompose = 0, no validation"
    if experiment.start == "closed":
        yield "a start in closed form has no epsilon"
    if experiment.dtype != "float32" or experiment.compile:
        yield "it computes in float32 and without compile"
    if experiment.buffers != "frozen" and any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    ):
        yield "BatchNorm mixes the samples of a batch: buffers = 'frozen', or a network with GroupNorm"


def spend_budgets(
    experiment: Experiment, steps: Mapping[str, PrivateSteps], clients: Iterable[str], run: str
) -> None:
    """Enter the steps that clients are about to take in a round into their ledgers, on disk.

    Args:
        experiment: Its `dp_budget` bounds what each client spends; without one nothing is entered.
        steps: Every client's noisy steps.
        clients: Who trains in the round.
        run: Name of the run, for the ledger.

    Raises:
        FedLDError: A client's budget does not suffice for the round; its steps are then not taken.
    """
    target = make_privacy(experiment)
    if target is None or experiment.dp_budget is None or experiment.dp_ledger is None:
        return
    folder = experiment.dp_ledger.expanduser()
    make_folder(folder)
    for client in clients:
        ledger = BudgetLedger(folder / f"{quote(client, safe='')}.jsonl", experiment.dp_budget, target.delta)
        taken = steps[client]
        try:
            ledger.spend(run, NoisySteps(taken.noise, taken.rate, taken.steps))
        except FedLDError as error:
            raise FedLDError(f"client '{client}': {error}") from None


def privacy_note(experiment: Experiment, steps: dict[str, PrivateSteps]) -> str:
    """Give what is proved of a run, and what is not covered."""
    target = make_privacy(experiment)
    assert target is not None
    spent = [
        epsilon_of(
            [NoisySteps(client_steps.noise, client_steps.rate, client_steps.steps * experiment.rounds)],
            target.delta,
        )
        for client_steps in steps.values()
    ]
    noises = [client_steps.noise for client_steps in steps.values()]
    return (
        f"clients' updates over all {experiment.rounds} rounds have epsilon at most {max(spent):.3g} at "
        f"delta {target.delta:g} for one record more or less, with noise {min(noises):.3g} to "
        f"{max(noises):.3g}; "
        "numbers of samples, class counts and the mean colours of all images are not covered"
    )
