"""From an experiment's names to the values that they stand for; every name is checked here, before a run."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fedld.aggregation import make_rule
from fedld.config.experiment import Experiment, PartSettings
from fedld.data import AUGMENTATIONS, Augmentation, DataSpec, Federation, OwnAugmentation, check_names, load
from fedld.errors import FedLDError
from fedld.local import OBJECTIVES, Objective, Training
from fedld.local.optimiser import SCHEDULES, OptimiserSettings, Schedule, ScheduleKind
from fedld.methods import METHODS, Method
from fedld.models import MODELS, hidden_units
from fedld.models.unet import is_unet, unet_options
from fedld.privacy.accounting import PrivacyTarget
from fedld.registry import call_with, configure, name_of, options_of
from fedld.tasks import METRICS, TASKS, Classification, Measure, Metric, Task
from fedld.tasks.base import further_measures
from fedld.transforms import Chain, UpdateTransform, make_transform


def check(experiment: Experiment) -> None:
    """Refuse an experiment in which a name stands for nothing, or an option does not fit."""
    _check_optimiser(experiment, make_method(experiment))
    make_training(experiment)
    make_schedule(experiment).factor(1)
    make_metrics(experiment)
    make_transforms(experiment)
    make_privacy(experiment)
    if "dataset" not in experiment.own:
        check_names(make_data_spec(experiment))
    if is_unet(experiment.model):
        unet_options(experiment.model)
    elif "model" not in experiment.own:
        MODELS.check(experiment.model)
    hidden_units(experiment.head)


def make_method(experiment: Experiment) -> Method:
    """Make the method, with the experiment's objective and rule around it where they are set."""
    name, options = _split(experiment.method)
    own_values = experiment.own
    method = configure(own_values.get("method") or METHODS.find(name), options, f"method {name}")
    if experiment.objective:
        name, options = _split(experiment.objective)
        objective = own_values.get("objective") or OBJECTIVES.find(name)
        method = replace(method, objective=configure(objective, options, f"objective {name}"))
    if experiment.rule:
        name, options = _split(experiment.rule)
        granularity = options.pop("granularity", method.granularity)
        method = configure(method, {"granularity": granularity}, "rule")
        rule = (
            configure(own_values["rule"], options, f"rule {name}")
            if "rule" in own_values
            else make_rule(name, **options)
        )
        method = replace(method, rule=rule)
    if experiment.max_update_ratio is not None and method.max_update_ratio is None:
        method = replace(method, max_update_ratio=experiment.max_update_ratio)
    return method


def make_task(experiment: Experiment) -> Task:
    """Make the task: the named one, or that of a federation of the user's."""
    task: Task | None = experiment.own.get("task")
    if task is not None:
        return task
    dataset = experiment.own.get("dataset")
    name = experiment.task
    if name == "auto":
        name = dataset.task if isinstance(dataset, Federation) else Classification.name
    return TASKS.find(name)


def fit_task(task: Task, federation: Federation) -> Task:
    """Give a task with what it takes from sums over all clients' training targets."""
    sums = [
        client.target_sums if client.elsewhere else task.target_sums(federation.labels[client.train])
        for client in federation.clients
    ]
    return task.fitted(sums, federation.output_names)


def make_metrics(experiment: Experiment) -> dict[str, Metric]:
    """Collect the measures beside the built-in ones, by name."""
    own_metrics = experiment.own.get("metrics", {})
    short = {name: name.rpartition(":")[2].rpartition(".")[2] for name in experiment.metrics}
    built_in = {measure.name for measure in make_task(experiment).measures}
    for name in experiment.metrics:
        if short[name] in built_in:
            raise FedLDError(f"metric '{name}' is measured in every run: give one of your own another name")
        if list(short.values()).count(short[name]) > 1:
            raise FedLDError(f"two metrics are called '{short[name]}': give one of them another name")
    return {short[name]: own_metrics.get(name) or METRICS.find(name) for name in experiment.metrics}


def make_measures(experiment: Experiment) -> dict[str, Measure]:
    """Collect all measures of an experiment by name: those of its task, then the user's."""
    further = further_measures(make_metrics(experiment))
    return {measure.name: measure for measure in make_task(experiment).measures} | further


def make_transforms(experiment: Experiment) -> Chain:
    """Make the transforms of updates on their way to the server."""
    own_transforms = experiment.own.get("transform", {})
    named = [own_transforms.get(name) or make_transform(name) for name in experiment.transform]
    return Chain([*named, *_secure(experiment)])


def _secure(experiment: Experiment) -> list[UpdateTransform]:
    """Load the secure computation where it is set: it needs the extra `secure`."""
    if experiment.secure is None:
        return []
    try:
        from fedld.transforms.secure import SecureCombination, SecureSummation
    except ImportError:
        raise FedLDError(f"secure = '{experiment.secure}' needs: pip install 'fedld[secure]'") from None
    return [SecureSummation() if experiment.secure == "sum" else SecureCombination()]


def make_privacy(experiment: Experiment) -> PrivacyTarget | None:
    """Make the privacy parameters of `dp`; None where it is empty."""
    if not experiment.dp:
        return None
    pairs = [part.partition("=") for part in experiment.dp.split(",")]
    try:
        values = {name.strip(): float(value) for name, _, value in pairs}
        return PrivacyTarget(**values)
    except (TypeError, ValueError):
        raise FedLDError(
            f"dp takes epsilon, delta and clip, like epsilon=4,delta=1e-5,clip=1, not '{experiment.dp:.80}'"
        ) from None


def make_federation(experiment: Experiment) -> Federation:
    """Make the clients' data and the test set: the user's own, or a dataset divided among clients.

    With `folds` one of them is the test set. With `hold_out` a part of the clients' training images is the
    test set; with `validation` a part is set aside.
    """
    own_dataset = experiment.own.get("dataset")
    if own_dataset is None:
        federation = load(make_data_spec(experiment), whole=experiment.folds is not None)
    elif isinstance(own_dataset, Federation):
        federation = own_dataset
    else:
        federation = call_with(own_dataset, "dataset", **_data_options(experiment))
        if not isinstance(federation, Federation):
            raise FedLDError(
                f"dataset '{name_of(own_dataset)}' made a {type(federation).__name__}, not a Federation"
            )
    task = make_task(experiment)
    if federation.task != task.data:
        raise FedLDError(
            f"task '{task.name}' does not fit '{federation.name}', which is for {federation.task}"
        )
    federation = with_outputs(federation, task)
    if experiment.folds is not None and experiment.fold is not None:
        federation = federation.take_fold(experiment.fold, experiment.folds, experiment.data_seed or 0)
    if experiment.hold_out is not None:
        federation = federation.hold_out(experiment.hold_out, experiment.seed)
    if experiment.validation is not None:
        federation = federation.set_aside(experiment.validation, experiment.seed)
    return federation


def with_outputs(federation: Federation, task: Task) -> Federation:
    """Rename a federation's outputs to those of the task."""
    names = task.output_names(federation.classes)
    return federation if names == federation.classes else replace(federation, classes=names)


def describe_objective(objective: Objective, **changes: Any) -> PartSettings:
    """Describe an objective as a table, with some of its options changed.

    >>> describe_objective(OBJECTIVES["marg-log"], lam=0.5)
    {'name': 'marg-log', 'lam': 0.5}
    """
    name = next(name for name, value in OBJECTIVES.items() if type(value) is type(objective))
    return {"name": name, **asdict(objective), **changes}


def make_data_spec(experiment: Experiment) -> DataSpec:
    """Make the specification of the data and of its division among clients."""
    spec = configure(DataSpec(), _data_options(experiment), "data")
    own_function = experiment.own.get("partition")
    return spec if own_function is None else replace(spec, partition=own_function)


TABLE = {"target_column", "site_column", "split_column"}
"""Settings that say what the columns of a table mean."""


def _data_options(experiment: Experiment) -> dict[str, Any]:
    fields = {"dataset", "data_root", "split", "clients", "partition", "alpha", "classes_per_client"}
    shared = experiment.model_dump(include=fields | TABLE | {"min_size", "image_size", "skip_bad"})
    shared["task"] = make_task(experiment).data
    seed = experiment.seed if experiment.data_seed is None else experiment.data_seed
    return {**shared, "seed": seed, "test_seed": experiment.data_seed or 0, **experiment.data}


def make_training(experiment: Experiment) -> Training:
    """Make the parameters of local training, at the full learning rate."""
    return Training(
        epochs=experiment.local_epochs,
        batch_size=experiment.batch_size,
        lr=experiment.lr,
        momentum=experiment.momentum,
        weight_decay=experiment.weight_decay,
        buffers=experiment.buffers,
        dtype=experiment.dtype,
        augment=make_augmentation(experiment),
        steps=experiment.local_steps,
        optimiser=make_optimiser(experiment),
    )


def make_augmentation(experiment: Experiment) -> Augmentation | OwnAugmentation | None:
    """Make the random changes to training images: a named set in its strength, or the user's own."""
    own_augmentation: OwnAugmentation | None = experiment.own.get("augment")
    if own_augmentation is not None:
        if experiment.augment_strength != 1:
            raise FedLDError("augment_strength is for named sets: give your own function its own strength")
        return own_augmentation
    if experiment.augment == "none":
        return None
    return AUGMENTATIONS.find(experiment.augment).strengthened(experiment.augment_strength)


def make_schedule(experiment: Experiment) -> Schedule:
    """Make the learning rate over the rounds: a named schedule, or the user's function of the round."""
    own_schedule = experiment.own.get("lr_schedule")
    kind: ScheduleKind = "own" if own_schedule else SCHEDULES.find(experiment.lr_schedule)
    return Schedule(
        kind=kind,
        rounds=experiment.rounds,
        warmup=experiment.lr_warmup,
        every=experiment.lr_step,
        decay=experiment.lr_decay,
        function=own_schedule,
    )


def make_optimiser(experiment: Experiment) -> OptimiserSettings:
    """Make the parameters that all clients' optimisers share."""
    return OptimiserSettings(
        kind=experiment.optimiser,
        beta1=experiment.beta1,
        beta2=experiment.beta2,
        epsilon=experiment.epsilon,
        keeps_moments=experiment.moments == "kept",
        clip=experiment.clip_gradients,
        head_lr=experiment.head_lr,
        centred=experiment.steps == "centred",
    )


def _check_optimiser(experiment: Experiment, method: Method) -> None:
    """Refuse an optimiser that a method's equations do not allow."""
    if method.needs_linear and not make_optimiser(experiment).linear:
        settings = {"optimiser": "sgd", "moments": "reset", "head_lr": None, "steps": "plain"}
        changed = {key: getattr(experiment, key) for key in settings}
        if changed["optimiser"] == "nesterov":
            settings["optimiser"] = "nesterov"
        wrong = ", ".join(f"{key} = {value!r}" for key, value in changed.items() if value != settings[key])
        raise FedLDError(
            f"method '{experiment.method['name']}' cannot be trained with {wrong}: {method.needs_linear}"
        )


def meant_option(settings: Mapping[str, Any], key: str) -> str | None:
    """Suggest `method.mu` for an unknown setting `mu`; None if no method has such an option."""
    part = settings.get("method", {"name": "fedavg"})
    name = part.get("name", "") if isinstance(part, dict) else part
    owners = [owner for owner, method in METHODS.items() if key in options_of(method)]
    if name in owners:
        return f"write 'method.{key}'"
    if not owners:
        return None
    names = ", ".join(owners[:3]) + (" and others" if len(owners) > 3 else "")
    return f"it is an option of {names}: write 'method.{key}' in a run, '{owners[0]}.{key}' in a comparison"


def _split(part: PartSettings) -> tuple[str, PartSettings]:
    return part["name"], {key: value for key, value in part.items() if key != "name"}
