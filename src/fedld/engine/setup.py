"""Before the first round: data, method and model, checked, and the draw of a round's clients."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fedld.aggregation import GramRule, Measured
from fedld.config.experiment import Experiment
from fedld.config.resolve import fit_task, make_method
from fedld.engine.backends.base import Engine
from fedld.engine.backends.machine import THIS_MACHINE
from fedld.engine.backends.processes import serially
from fedld.engine.features import Tell, cached_features
from fedld.engine.hardware import find_device
from fedld.engine.jobs import Parts, Setup
from fedld.engine.network import divided, make_layout, normalised
from fedld.engine.private import privacy_note, private_steps
from fedld.errors import FedLDError, nearest
from fedld.local.base import ContextObjective, FunctionObjective, Objective, PixelObjective, TaskObjective
from fedld.local.samples import parse_class_weights
from fedld.methods import Method, Server
from fedld.methods.closed import ClosedForm
from fedld.methods.newton import CoxNewton, Newton
from fedld.models import Model, Trunk
from fedld.models.base import beyond_features
from fedld.models.build import VECTOR
from fedld.models.centring import centred_layers
from fedld.records.schema import FORMAT, RunFacts
from fedld.seeds import numpy_generator
from fedld.tasks.base import Task, defined
from fedld.tasks.segmentation import Segmentation
from fedld.tasks.survival import Survival
from fedld.transforms import UpdateTransform


@serially()
def prepare(
    experiment: Experiment, states: Path, engine: Engine = THIS_MACHINE, tell: Tell = print
) -> tuple[Setup, Server]:
    """Make data, method and model of an experiment, checked, and the server's first state."""
    method = make_method(experiment)
    parts = Parts.of(experiment)
    everybody = engine.federation(experiment)
    _check_client_rates(experiment, [client.name for client in everybody.clients])
    federation = normalised(experiment, method.federation(everybody))
    parts = replace(parts, task=fit_task(parts.task, federation))
    method = for_task(experiment, method, parts.task)
    parts = weighted(parts, experiment, method, federation.classes)
    _check_global(experiment, method)
    check_sums(experiment, method, parts.task)
    rows = len(sample(experiment, [client.name for client in federation.clients], 1))
    if experiment.quorum(rows) > rows:
        of = f"{rows} of {len(federation.clients)} clients"
        raise FedLDError(f"min_clients is {experiment.min_clients}, but only {of} take part in a round")
    trunk, model = divided(experiment, method, federation)
    if experiment.head_lr is not None and not isinstance(model, Model):
        raise FedLDError(
            f"head_lr needs a network that names its head, which {type(model).__name__} does not"
        )
    check_centred(experiment, model)
    layout = make_layout(experiment, method, model)
    server = method.init(layout.flatten(model), layout, [client.size for client in federation.clients])
    one_body = beyond_features(model, [entry.name for entry in layout.entries if entry.private])
    digest = trunk.digest if trunk else ""
    setup = Setup(
        experiment=experiment,
        method=method,
        federation=federation,
        layout=layout,
        states=states,
        trunk=digest,
        one_body=one_body,
        parts=parts,
    )
    setup = replace(setup, private=private_steps(experiment, method, model, federation))
    check_functions(setup)
    setup.transforms.check(layout)
    check_hidden(setup, rows)
    engine.check(setup, rows)
    return replace(setup, features=features_for(setup, trunk, tell)), server


def weighted(parts: Parts, experiment: Experiment, method: Method, classes: Sequence[str]) -> Parts:
    """Give the parts with their weights of classes; refuse weights where they would be ignored."""
    if experiment.class_weights == "none":
        return parts
    name = experiment.method["name"]
    problems = {
        f"needs classes, which task '{parts.task.name}' has not": parts.task.name != "classification",
        f"does not reach method '{name}', which solves its head from sums": method.second_moments,
        "would tell numbers of samples that differential privacy hides (dp)": experiment.dp is not None,
        "changes the plain cross-entropy: with another objective set weigh = 'sampling'": (
            experiment.weigh == "loss" and type(method.objective) is not Objective
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise FedLDError(f"class_weights = '{experiment.class_weights}' {problem}")
    weights = parse_class_weights(experiment.class_weights, classes, experiment.weigh)
    return replace(parts, training=replace(parts.training, class_weights=weights))


def _check_client_rates(experiment: Experiment, clients: Collection[str]) -> None:
    """Refuse a learning rate for a client that is not there."""
    for name in experiment.client_lr:
        if name not in clients:
            raise FedLDError(f"client_lr names no client with '{name}': {nearest(name, list(clients))}")


def _check_global(experiment: Experiment, method: Method) -> None:
    """Refuse settings about global models for a method that has none."""
    problems = {
        "validation chooses among": experiment.validation is not None,
        "average_models averages": experiment.average_models > 0,
    }
    for problem, applies in problems.items():
        if applies and not method.has_global:
            raise FedLDError(f"{problem} global models, and method '{experiment.method['name']}' has none")


def check_hidden(setup: Setup, rows: int) -> None:
    """Refuse what needs single updates where a transform hides them from the server."""
    transform, experiment, method = setup.transforms.sums_only, setup.experiment, setup.method
    if transform is None:
        return
    least, most = transform.clients
    problems = {
        f"a round needs at least {least} clients and at most {most}": not least <= rows <= most,
        f"method '{experiment.method['name']}' needs single updates or messages": not method.sums_suffice,
        **(_beyond_gram(setup, transform) if transform.opens_gram else _beyond_sums(method)),
        "the loss decomposition needs single models (decompose = 0)": experiment.decompose > 0,
        "max_update_ratio compares single updates": method.max_update_ratio is not None,
        "every client would tell its validation loss (validation = none)": experiment.validation is not None,
        "statistics that stay with clients are sent singly (buffers = local)": experiment.buffers == "local",
        "sites would send it their updates (one machine only)": experiment.secure is None
        and any(client.elsewhere for client in setup.federation.clients),
    }
    seen = "sums and inner products" if transform.opens_gram else "sums"
    for problem, applies in problems.items():
        if applies:
            raise FedLDError(f"transform '{transform.name}' shows the server {seen} alone: {problem}")


def _beyond_sums(method: Method) -> dict[str, bool]:
    """List what needs more than sums of updates."""
    return {
        f"rule '{method.rule.name}' needs single updates{_instead(method)}": not method.rule.sums_suffice,
        "max_weight bounds single clients": method.max_weight is not None,
    }


def _beyond_gram(setup: Setup, transform: UpdateTransform) -> dict[str, bool]:
    """List what needs more than the Gram matrix of the whole updates."""
    method, layout, least = setup.method, setup.layout, transform.least_parameters
    gram_rule = isinstance(method.rule, GramRule)
    statistics = any(entry.name.endswith("running_mean") and not entry.private for entry in layout.entries)
    moving = statistics and setup.experiment.buffers != "frozen"
    return {
        f"rule '{method.rule.name}' needs more than inner products of updates": not gram_rule,
        f"granularity '{method.granularity}' needs more than one matrix": method.granularity != "model",
        f"rule '{method.rule.name}' takes the median of clients' BatchNorm statistics (buffers = frozen)": (
            method.rule.robust and moving
        ),
        f"an update has {layout.shared} numbers, and a sketch needs at least {least}": layout.shared < least,
    }


def _instead(method: Method) -> str:
    """Say how rules can do without single updates."""
    if isinstance(method.rule, Measured):
        return " (rules = 'mean' and vote = 'mean' need sums alone)"
    return " (secure = 'gram' gives it their inner products)" if isinstance(method.rule, GramRule) else ""


UNTOLD = (
    "losses are known as means over all clients, and tests of the final or of personal models "
    "at single clients are not made"
)
"""What is not known of single clients where the server sees sums alone."""


def notes(setup: Setup) -> Iterator[str]:
    """Give what a user should know who asked for something that this data or this network does not have."""
    experiment, method, clients = setup.experiment, setup.method, setup.federation.clients
    divided_here = type(method).federation is Method.federation and not any(
        client.elsewhere for client in clients
    )
    if divided_here and "clients" in experiment.model_fields_set and experiment.clients != len(clients):
        yield f"clients = {experiment.clients} is not used: the data names its {len(clients)} clients"
    hidden = setup.transforms.sums_only
    if hidden is not None and hidden.opens_gram:
        yield (
            f"transform '{hidden.name}' shows the server inner products of sketches and one combination of "
            "updates: lengths and angles are those of sketches, with a fresh seed in every round; " + UNTOLD
        )
    elif hidden is not None:
        yield (
            f"transform '{hidden.name}' shows the server sums alone: lengths and angles of single updates, "
            "conflicts and outliers are not known; " + UNTOLD
        )
    if (ratio := method.max_update_ratio) is not None:
        yield f"updates longer than {ratio:g} times the median are refused (max_update_ratio)"
    if setup.private:
        yield privacy_note(experiment, dict(setup.private))
    if _done_early(setup):
        yield f"method '{experiment.method['name']}' is done after round 1: --rounds 1 gives the same model"
    if type(method).private is not Method.private and not setup.layout.private_size:
        yield (
            f"method '{experiment.method['name']}' keeps nothing with the clients here: network "
            f"'{experiment.model}' has no such part (no BatchNorm, for fedbn and silobn)"
        )


def _done_early(setup: Setup) -> bool:
    """Say whether a method in closed form has nothing to do after its first round."""
    experiment = setup.experiment
    closed = isinstance(setup.method, ClosedForm)
    return closed and experiment.rounds > 1 and len(sample(experiment, setup.sizes, 1)) == len(setup.sizes)


CLASSES = {
    "ccvr": "statistics of every class",
    "feddisco": "every client's class counts",
    "fedgh": "prototypes of every class",
    "fedma": "class counts",
    "gamf": "class counts",
    "fedpac": "centroids of every class",
    "fedrod": "a head that is balanced by class counts",
    "fedsr": "a representation of every class",
    "lda": "means of every class",
    "newton": "probabilities of classes",
    "ridge": "codes of classes",
}
"""Methods that need classes, and what of them."""
OTHER_TASKS = {"newton": ("survival",), "ridge": ("multilabel", "regression")}
"""Tasks without classes for which some of these methods have another form."""


def for_task(experiment: Experiment, method: Method, task: Task) -> Method:
    """Give the method as it trains for a task: where samples have no classes, by the task's plain loss.

    Raises:
        FedLDError: the method or the objective needs classes.
    """
    if task.name == "classification":
        return method
    if task.dense and experiment.augment != "none":
        raise FedLDError(
            f"augment = '{experiment.augment}' changes pictures and not their masks: take 'none'"
        )
    name = str(experiment.method["name"])
    if isinstance(method, Newton) and isinstance(task, Survival):
        return CoxNewton.of(method, task)
    if name in CLASSES and task.name not in OTHER_TASKS.get(name, ()):
        raise FedLDError(f"method '{name}' needs {CLASSES[name]}, and {task.name} {task.lacks}")
    if isinstance(method.objective, FunctionObjective):
        return method
    asked = experiment.objective or {}
    contextual = isinstance(method.objective, ContextObjective)
    by_pixel = isinstance(task, Segmentation)
    if contextual or (not by_pixel and asked.get("name", "cross-entropy") != "cross-entropy"):
        which = asked.get("name") or type(method.objective).__name__
        raise FedLDError(f"objective '{which}' of '{name}' needs classes, and {task.name} {task.lacks}")
    if isinstance(task, Segmentation) and type(method.objective) is not Objective:
        return replace(method, objective=PixelObjective(task, method.objective))
    return replace(method, objective=TaskObjective(task))


def facts_of(setup: Setup) -> RunFacts:
    """Give what a reader must know before it reads the records of a run."""
    measures = (*setup.task.measures, *setup.metrics.values())
    plain = [measure.to_json() for measure in measures]
    return {"format": FORMAT, "task": setup.task.name, "measures": plain}


def check_functions(setup: Setup) -> None:
    """Try a user's metrics and objective on a few logits, before anything is written."""
    outputs, targets = setup.task.batch(setup.federation.outputs)
    tally = setup.task.sample_tally(outputs, targets)
    for name, measure in setup.metrics.items():
        if defined(measure, tally) is None:
            raise FedLDError(f"metric '{name}' gives no finite number for finite logits of all classes")
    if isinstance(setup.method.objective, FunctionObjective):
        setup.method.objective.check(torch.zeros_like(outputs).requires_grad_(), targets)


def check_centred(experiment: Experiment, model: nn.Module) -> None:
    """Refuse centred steps where they would not be those of centred inputs."""
    if experiment.steps != "centred":
        return
    kind = experiment.optimiser
    problems = {
        "needs trained layers before the head: set train to last:N or all": experiment.train == "head",
        "needs BatchNorm's statistics to stay: set buffers to frozen": experiment.buffers != "frozen",
        f"is for sgd and nesterov, not for optimiser = '{kind}'": kind not in ("sgd", "nesterov"),
        "measures means of activations, which have no epsilon: not with dp": experiment.dp is not None,
        "needs a convolution or a linear layer with a bias or a BatchNorm": not centred_layers(model),
    }
    for problem, found in problems.items():
        if found:
            raise FedLDError(f"steps = 'centred' {problem}")


def check_sums(experiment: Experiment, method: Method, task: Task) -> None:
    """Refuse a closed start without a linear head, and sums that would change from round to round."""
    if experiment.start == "closed" and task.name != "classification":
        raise FedLDError(f"start = 'closed' solves for codes of classes, and {task.name} {task.lacks}")
    if experiment.start == "closed" and experiment.head != "linear":
        raise FedLDError(f"start = 'closed' solves for a linear head, not for head = '{experiment.head}'")
    if not method.second_moments:
        return
    name = experiment.method["name"]
    if experiment.train == "all" and experiment.model != VECTOR:
        raise FedLDError(f"method '{name}' solves for the head on a frozen trunk: set train to 'head'")
    if experiment.augment != "none":
        raise FedLDError(
            f"method '{name}' sums over images as they are: augment = '{experiment.augment}' cannot apply"
        )


def features_for(setup: Setup, trunk: Trunk | None, tell: Tell, *, quota: float | None = None) -> Path | None:
    """Give the frozen trunk's outputs for every image, where nothing random comes before the trunk.

    With a `quota` of bytes for the whole cache they are computed in this process.
    """
    experiment = setup.experiment
    if trunk is None or not experiment.feature_cache:
        return None
    if experiment.augment != "none":
        tell("the frozen trunk sees augmented images, so its outputs are not cached: it runs for every batch")
        return None
    return cached_features(
        trunk, setup.federation, device=find_device(experiment.device), tell=tell, quota=quota
    )


def sample(experiment: Experiment, clients: Collection[str], round_: int) -> list[str]:
    """Draw the names of the clients of a round, so many or such a share, from the round's own generator."""
    if len(clients) == 1:
        return list(clients)  # pooled data are one client
    wanted = experiment.sample_clients or max(1, round(experiment.sample_rate * len(clients)))
    if wanted > len(clients):
        raise FedLDError(f"cannot sample {wanted} of {len(clients)} clients")
    generator = numpy_generator(experiment.seed, "sample", round_)
    drawn = set(generator.choice(len(clients), wanted, replace=False).tolist())
    return [name for place, name in enumerate(clients) if place in drawn]
