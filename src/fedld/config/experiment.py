"""An experiment is one TOML file, checked before anything runs and saved resolved beside its results.

Nothing here imports torch: what the names stand for is found in `fedld.config.resolve`.
"""

import tomllib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from fedld.config.settings import setting, settings_of
from fedld.errors import FedLDError, nearest
from fedld.paths import absolute, user_path
from fedld.registry import first_problem

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
PartSettings = dict[str, Any]
LARGEST_TOML = 1 << 20  # bytes

DEVICE = r"^(auto|cpu|cuda|cuda:[0-9]{1,3}|mps)$"
"""Names of devices."""


class Experiment(BaseModel):
    """All settings of a run. `method`, `objective` and `rule` are tables: a name and that value's options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str = setting(
        "data",
        "fundus-sim",
        "fundus-sim, digits, npz:PATH, folder:PATH, csv:FILE, retina, covid-fl",
        compared=True,
    )
    task: str = setting(
        "data",
        "auto",
        "auto, classification, multilabel, regression, regression-absolute, segmentation, survival, "
        "survival-discrete",
        sent_to_sites=True,
        compared=True,
    )
    target_column: str | None = setting(
        "data", None, "column of csv:FILE that is to be learned; of survival TIME,EVENT", compared=True
    )
    site_column: str | None = setting("data", None, "column of csv:FILE that names clients", compared=True)
    split_column: str | None = setting("data", None, "column of csv:FILE: train or test", compared=True)
    data_root: Path | None = setting("data", None, "folder of a published dataset", compared=True)
    data_seed: Seed | None = setting(
        "data", None, "seed of the test images (else 0) and of the partition (else the run's)", compared=True
    )
    split: Count | None = setting("data", None, "published client list of that dataset", compared=True)
    clients: Count = setting("data", 5, "number of clients", compared=True)
    partition: str = setting(
        "data",
        "auto",
        "auto, iid, dirichlet, dirichlet-raw, dirichlet-sslfl, site, column:NAME, quantity, classes",
        compared=True,
    )
    alpha: float = setting("data", 0.5, "Dirichlet concentration: small is heterogeneous", compared=True)
    classes_per_client: Count = setting(
        "data", 2, "classes per client of the partition 'classes'", compared=True
    )
    min_size: Count = setting("data", 10, "fewest training images of a client", compared=True)
    image_size: Count | None = setting(
        "data", None, "side of the images in pixels", sent_to_sites=True, compared=True
    )
    skip_bad: bool = setting("data", False, "leave unreadable image files out", compared=True)
    hold_out: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        "data", None, "test on this share of the training images, never on the test set", compared=True
    )
    folds: Annotated[int, Field(ge=2, le=1000)] | None = setting(
        "data", None, "cross-validation: parts of whole patients, each of which is tested once", compared=True
    )
    fold: Count | None = setting("data", None, "which of the folds is tested, from 1")
    data: PartSettings = setting(
        "data",
        {},
        "options of the dataset: test_fraction, samples, feature_shift, shortcut, drop",
        compared=True,
    )

    model: str = setting(
        "model",
        "cnn",
        "cnn, vgg9, resnet8, resnet8-gn, resnet8-gnws, resnet18, resnet50, mobilenet_v2, "
        "efficientnet_lite0, linear, unet (unet:width=8,depth=3,norm=group)",
        sent_to_sites=True,
        compared=True,
    )
    weights: Path | None = setting(
        "model", None, "initial weights, .safetensors or weights-only .pth", compared=True
    )
    head: str = setting(
        "model",
        "linear",
        "linear, or mlp:64 for a hidden layer of 64 units",
        sent_to_sites=True,
        compared=True,
    )
    train: str = setting(
        "model",
        "all",
        "all, head, last:N blocks, or the first module to train: the rest is frozen",
        sent_to_sites=True,
        compared=True,
    )
    start: Literal["seed", "closed"] = setting(
        "model", "seed", "head before round 1: from the seed, or closed: solved from sums over clients"
    )
    standardise: bool = setting(
        "model",
        True,
        "train = head: inputs of the head get mean 0 and deviation 1; never with dp",
        compared=True,
    )
    normalisation: Literal["auto", "data", "imagenet"] = setting(
        "model", "auto", "of pixels: data, imagenet, or auto (imagenet with weights)", compared=True
    )
    feature_cache: bool = setting("run", True, "compute the outputs of a frozen trunk once and keep them")

    method: PartSettings = setting(
        "training", {"name": "fedavg"}, "federated method, see 'fedld methods'", sent_to_sites=True
    )
    objective: PartSettings | None = setting(
        "training", None, "what clients minimise: cross-entropy, marg-log, ...", sent_to_sites=True
    )
    rule: PartSettings | None = setting(
        "training", None, "how the server combines: mean, principal, consensus, ...", sent_to_sites=True
    )
    rounds: Count = setting("training", 15, "communication rounds", sent_to_sites=True, compared=True)
    local_epochs: Count = setting("training", 1, "epochs that a client trains per round", sent_to_sites=True)
    local_steps: Count | None = setting(
        "training", None, "steps that every client trains per round, instead of epochs", sent_to_sites=True
    )
    batch_size: Count = setting("training", 50, "samples per step", sent_to_sites=True)
    lr: Positive = setting("training", 0.05, "learning rate of the clients", sent_to_sites=True)
    head_lr: Positive | None = setting(
        "training", None, "learning rate of the head; default: as lr", sent_to_sites=True
    )
    client_lr: dict[str, Positive] = setting(
        "training", {}, "learning rates of single clients, by name, instead of lr", sent_to_sites=True
    )
    lr_schedule: str = setting(
        "training",
        "constant",
        "learning rate over the rounds: constant, cosine, step, or a function of the round",
        sent_to_sites=True,
    )
    lr_warmup: Annotated[int, Field(ge=0)] = setting(
        "training", 0, "first rounds, in which the learning rate grows to its full value", sent_to_sites=True
    )
    lr_step: Count = setting(
        "training", 10, "rounds between two decays of the step schedule", sent_to_sites=True
    )
    lr_decay: Share = setting(
        "training", 0.1, "factor of each decay of the step schedule", sent_to_sites=True
    )
    optimiser: Literal["sgd", "nesterov", "adam", "adamw"] = setting(
        "training", "sgd", "optimiser of the clients: sgd, nesterov, adam or adamw", sent_to_sites=True
    )
    steps: Literal["plain", "centred"] = setting(
        "training",
        "plain",
        "of trained layers: plain, or centred: as if their inputs had mean 0 (buffers = frozen)",
        sent_to_sites=True,
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = setting(
        "training", 0.5, "momentum of the clients, with sgd and nesterov", sent_to_sites=True
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = setting(
        "training", 0.9, "decay of the first moment of adam and adamw", sent_to_sites=True
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = setting(
        "training", 0.999, "decay of the second moment of adam and adamw", sent_to_sites=True
    )
    epsilon: Positive = setting("training", 1e-8, "smallest divisor of adam and adamw", sent_to_sites=True)
    moments: Literal["reset", "kept"] = setting(
        "training",
        "reset",
        "momentum and moments: reset in every round, or kept by each client",
        sent_to_sites=True,
    )
    clip_gradients: Positive | None = setting(
        "training", None, "longest gradient of a batch; longer ones are shortened to it", sent_to_sites=True
    )
    weight_decay: NonNegative = setting("training", 0.0, "weight decay of the clients", sent_to_sites=True)
    class_weights: str = setting(
        "training",
        "none",
        "classes weigh alike: none; balanced; or by name: covid=3,normal=1 (classification)",
        sent_to_sites=True,
    )
    weigh: Literal["loss", "sampling"] = setting(
        "training",
        "loss",
        "what class_weights apply to: the loss of samples, or how often they are drawn",
        sent_to_sites=True,
    )
    augment: str = setting(
        "training",
        "none",
        "random changes to training images: none, natural, xray, fundus, retina, covid-fl, or a function",
        sent_to_sites=True,
    )
    augment_strength: Positive = setting(
        "training", 1.0, "width of the ranges of a named set of random changes", sent_to_sites=True
    )
    buffers: Literal["global", "local", "frozen"] = setting(
        "training", "global", "BatchNorm statistics: global, local or frozen", sent_to_sites=True
    )
    transform: list[str] = setting(
        "training",
        [],
        "of updates on their way, in order: clip:BOUND, quantise:BITS, topk:SHARE",
        sent_to_sites=True,
    )
    secure: Literal["sum", "gram"] | None = setting(
        "training",
        None,
        "sum: the server sees no single update; gram: but inner products, for rules of them",
        sent_to_sites=True,
    )
    dp: str | None = setting(
        "training",
        None,
        "differential privacy of clients' records: epsilon=4,delta=1e-5,clip=1",
        sent_to_sites=True,
    )
    dp_budget: Positive | None = setting(
        "training",
        None,
        "on one machine: epsilon that each client may spend over all runs that share dp_ledger",
    )
    dp_ledger: Path | None = setting(
        "training", None, "folder in which every client's spent privacy budget is kept, over all runs"
    )
    average_models: Annotated[float, Field(ge=0, lt=1)] = setting(
        "training",
        0.0,
        "final model: mean over rounds, a model counting so many times as much as the next one; 0: the last",
    )
    sample_rate: Share = setting("training", 1.0, "share of clients that take part in a round")
    sample_clients: Count | None = setting("training", None, "number of clients in a round, instead")
    seed: Seed = setting("training", 0, "seed of data, initial weights and order", sent_to_sites=True)

    metrics: list[str] = setting(
        "evaluation", [], "further measures: macro-f1, kappa, sensitivity, specificity, sensitivity-at-95"
    )
    patience: Count | None = setting(
        "evaluation", None, "end after so many rounds without a lower loss on validation images"
    )
    validation: Annotated[float, Field(gt=0, lt=1)] | None = setting(
        "evaluation",
        None,
        "share of clients' training images set aside: to choose best.safetensors, for the rule 'measured'",
        sent_to_sites=True,
        compared=True,
    )
    specificity: Share = setting(
        "evaluation", 0.9, "specificity at which each site's sensitivity is given", sent_to_sites=True
    )
    eval_every: Count = setting("evaluation", 1, "rounds between evaluations")
    personal_every: Count | None = setting(
        "evaluation", None, "rounds between evaluations of personalised models; default: as eval_every"
    )
    client_losses: bool = setting(
        "evaluation", True, "measure clients' losses before and after training", sent_to_sites=True
    )
    decompose: Annotated[int, Field(ge=0)] = setting(
        "evaluation", 0, "loss decomposition every N rounds, 0 = never", sent_to_sites=True
    )
    decompose_samples: Count | None = setting(
        "evaluation", None, "estimate the decomposition on at most N samples per client", sent_to_sites=True
    )

    workers: Annotated[int, Field(ge=0)] | None = setting(
        "run", None, "worker processes, 0 = in this process; default: cores"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "run",
        "float32",
        "networks compute in float32, or in mixed precision: bfloat16 or float16",
        sent_to_sites=True,
    )
    device: Annotated[str, Field(pattern=DEVICE)] = setting(
        "run", "cpu", "auto, cpu, cuda, cuda:NUMBER or mps"
    )
    compile: bool = setting("run", False, "compile the network with torch")
    checkpoint_every: Count = setting("run", 1, "rounds between checkpoints")
    keep_checkpoints: Count | None = setting(
        "run", None, "last checkpoints to keep; default: 2 during the run, 1 when it is finished"
    )
    on_client_failure: Literal["retry", "skip", "stop"] = setting("run", "retry", "retry, skip or stop")
    min_clients: Count | Literal["all"] = setting(
        "run", 1, "fewer usable replies than this end the run; all: every client drawn"
    )
    max_update_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = setting(
        "run",
        None,
        "refuse updates longer than so many times the median; without it 10 under Flower, else none",
    )
    dry_run: bool = setting("run", True, "two steps on a few images at every site before round 1 (Flower)")
    grace: NonNegative | None = setting(
        "run", None, "seconds to wait for the others once min_clients have replied (Flower)"
    )
    round_timeout: Positive | None = setting("run", None, "seconds that a round may take")
    wait_for_clients: NonNegative = setting(
        "run", 600.0, "seconds to wait for sites, at the start and below quorum (Flower)"
    )

    _own: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def own(self) -> Mapping[str, Any]:
        """Values that only the user has, by the setting that names them; they are not saved."""
        return self._own

    def quorum(self, drawn: int) -> int:
        """Compute the number of usable replies that a round with so many drawn clients needs."""
        return drawn if self.min_clients == "all" else self.min_clients

    @model_validator(mode="before")
    @classmethod
    def _model_of_masks(cls, values: Any) -> Any:
        """Take a U-Net for masks where no model is named."""
        if isinstance(values, dict) and values.get("task") == "segmentation" and "model" not in values:
            return {**values, "model": "unet"}
        return values

    @field_validator("method", "objective", "rule", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Allow `method = "fedavg"` for `method = {name = "fedavg"}`."""
        return {"name": value} if isinstance(value, str) else value

    @field_validator("method", "objective", "rule")
    @classmethod
    def _has_name(cls, value: PartSettings | None) -> PartSettings | None:
        if value is not None and not isinstance(value.get("name"), str):
            raise ValueError("the table needs a 'name'")
        return value

    @model_validator(mode="after")
    def _one_length_of_training(self) -> Self:
        if self.local_steps is not None and self.local_epochs != 1:
            raise ValueError("local_steps and local_epochs exclude each other: give one of them")
        if self.lr_warmup >= self.rounds:
            raise ValueError(f"lr_warmup = {self.lr_warmup} leaves none of {self.rounds} rounds at full rate")
        if (self.folds is None) != (self.fold is None) or (self.fold or 0) > (self.folds or 0):
            raise ValueError(
                f"folds = {self.folds} and fold = {self.fold} do not fit: a run tests one of the folds, "
                "`fedld compare --folds` all of them"
            )
        if self.optimiser == "nesterov" and not self.momentum:
            raise ValueError("optimiser = 'nesterov' needs a momentum above 0")
        return self

    def to_toml(self) -> str:
        """Write the experiment with all defaults and absolute paths, so that it repeats from anywhere."""
        plain = self.model_dump(mode="json", exclude_none=True)
        for key in ("data_root", "weights"):
            if key in plain:
                plain[key] = absolute(plain[key])
        kind, colon, path = self.dataset.partition(":")
        if kind in ("npz", "folder", "csv"):
            plain["dataset"] = f"{kind}{colon}{absolute(path)}"
        return tomli_w.dumps({k: v for k, v in plain.items() if v not in ({}, [])})


SETTINGS = settings_of(Experiment)
"""Metadata of every setting, by name."""

SYNONYMS = {
    "learning_rate": "lr",
    "optimizer": "optimiser",
    "epochs": "local_epochs",
    "steps": "local_steps",
    "normalization": "normalisation",
    "scheduler": "lr_schedule",
    "schedule": "lr_schedule",
    "grad_clip": "clip_gradients",
    "gradient_clipping": "clip_gradients",
    "augmentation": "augment",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "n_clients": "clients",
    "network": "model",
    "algorithm": "method",
    "strategy": "method",
    "aggregation": "rule",
    "loss": "objective",
}
"""Names that other tools have for a setting."""

RENAMED = {"canary": "dry_run"}
"""Settings by their names of the version before, which still work."""


def make_experiment(settings: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Experiment:
    """Check settings; an unknown key or a bad value is one sentence.

    Values may stand in the place of names (`model=my_network`). Where settings were saved, `own` are the
    values that their names stand for.

    >>> make_experiment({"roundz": 3})
    Traceback (most recent call last):
    fedld.errors.FedLDError: unknown setting 'roundz': did you mean 'rounds'?
    """
    from fedld.config.own import name_values
    from fedld.config.resolve import check, meant_option

    settings = _with_new_names(settings)
    for key in settings:
        if key not in SETTINGS:
            meant = SYNONYMS.get(key)
            hint = f"did you mean '{meant}'?" if meant else meant_option(settings, key)
            raise FedLDError(f"unknown setting '{key}': {hint or nearest(key, list(SETTINGS))}")
    named, values = name_values(settings)
    try:
        experiment = Experiment(**named)
    except ValidationError as error:
        raise FedLDError(first_problem(error)) from None
    experiment._own |= {**values, **(own or {})}
    check(experiment)
    return experiment


def _with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings of the version before, with a warning.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     print(_with_new_names({"canary": False}), len(caught))
    {'dry_run': False} 1
    """
    for old, new in RENAMED.items():
        if old in settings:
            message = f"setting '{old}' is now called '{new}'; the old name works in this version only"
            warnings.warn(message, FutureWarning, stacklevel=3)
    return {RENAMED.get(key, key): value for key, value in settings.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file."""
    path = user_path(path)
    if not path.exists():
        raise FedLDError(f"there is no file '{path}'")
    if not path.is_file() or path.stat().st_size > LARGEST_TOML:
        raise FedLDError(f"'{path}' is no file of settings: it is a device, a folder or very large")
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FedLDError(f"cannot read '{path}': {error}") from None
    except FedLDError as error:
        raise FedLDError(f"cannot read '{path}' as TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse settings from TOML; any failure of the parser becomes one sentence."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FedLDError("tables or arrays are nested too deeply") from None
    except ValueError as error:  # also integers of thousands of digits
        raise FedLDError(str(error)) from None


def override(settings: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Apply `key=value` and `table.key=value`; values are read as TOML, else as text.

    >>> override({"method": "fedprox"}, ["method.mu=0.1", "model=resnet8"])
    {'method': {'name': 'fedprox', 'mu': 0.1}, 'model': 'resnet8'}
    """
    result = dict(settings)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise FedLDError(f"'{assignment}' is not of the form key=value")
        result = assign(result, key, plain_value(text))
    return result


def assign(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Set one setting, or one of a table's.

    >>> assign({"method": "fedprox"}, "method.mu", 0.1)
    {'method': {'name': 'fedprox', 'mu': 0.1}}
    """
    table, dot, inner = key.partition(".")
    if not dot:
        return {**settings, key: value}
    part = settings.get(table, {"name": "fedavg"} if table == "method" else {})
    if not isinstance(part, str | dict):
        raise FedLDError(f"'{key}' sets a part of '{table}', which is no table but {part!r}")
    return {**settings, table: {**({"name": part} if isinstance(part, str) else part), inner: value}}


def plain_value(text: str) -> Any:
    """Parse a value as TOML, else as text."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except FedLDError:
        return text
