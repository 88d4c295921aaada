"""An experiment is one TOML file, checked before anything runs and saved resolved beside its results."""

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedld.aggregation import Rule, make_rule
from fedld.data import AUGMENTATIONS, DataSpec
from fedld.errors import FedLDError, nearest
from fedld.local import OBJECTIVES, Objective, Training
from fedld.methods import METHODS, Method
from fedld.registry import configure, find, first_problem, options_of

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Part = dict[str, Any]


class Experiment(BaseModel):
    """All settings of a run. `method`, `objective` and `rule` are tables: a name and that value's options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Part = {"name": "fedavg"}
    objective: Part | None = None
    rule: Part | None = None

    dataset: str = "fundus-sim"
    data_root: Path | None = None
    data_seed: int | None = None
    split: int | None = None
    clients: Count = 5
    partition: str = "auto"
    alpha: float = 0.5
    classes_per_client: Count = 2
    min_size: Count = 10
    image_size: Count | None = None
    skip_bad: bool = False
    data: Part = {}
    augment: str = "none"

    model: str = "cnn"
    weights: Path | None = None

    rounds: Count = 15
    local_epochs: Count = 1
    batch_size: Count = 50
    lr: Positive = 0.02
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    buffers: Literal["global", "local", "frozen"] = "global"
    sample_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    sample_clients: Count | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    eval_every: Count = 1
    client_losses: bool = True
    decompose: Annotated[int, Field(ge=0)] = 0
    decompose_samples: Count | None = None

    workers: Annotated[int, Field(ge=0)] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    compile: bool = False
    checkpoint_every: Count = 1
    on_client_failure: Literal["retry", "skip", "stop"] = "retry"
    min_clients: Count = 1
    round_timeout: Positive | None = None
    wait_for_clients: NonNegative = 600.0

    @field_validator("method", "objective", "rule", mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        """Allow `method = "fedavg"` for `method = {name = "fedavg"}`."""
        return {"name": value} if isinstance(value, str) else value

    @field_validator("method", "objective", "rule")
    @classmethod
    def _has_name(cls, value: Part | None) -> Part | None:
        if value is not None and not isinstance(value.get("name"), str):
            raise ValueError("the table needs a 'name'")
        return value

    def make_method(self) -> Method:
        """The method as a value, with this experiment's objective and rule around it where they are set."""
        name, options = _split(self.method)
        method = configure(find(METHODS, name, "method"), options, f"method {name}")
        objective, rule = method.objective, method.rule
        if self.objective:
            objective = make_objective(self.objective)
        if self.rule:
            name, options = _split(self.rule)
            granularity = options.pop("granularity", method.granularity)
            rule, method = make_rule(name, **options), configure(method, {"granularity": granularity}, "rule")
        return _with_parts(method, objective, rule)

    def data_spec(self) -> DataSpec:
        """Where the data comes from and how it is dealt to clients."""
        own = {"dataset", "data_root", "split", "clients", "partition", "alpha", "classes_per_client"}
        shared = self.model_dump(include=own | {"min_size", "image_size", "skip_bad"})
        seed = self.seed if self.data_seed is None else self.data_seed
        return configure(DataSpec(), {**shared, "seed": seed, **self.data}, "data")

    def training(self) -> Training:
        """How every client trains."""
        augment = None if self.augment == "none" else find(AUGMENTATIONS, self.augment, "augmentation")
        return Training(
            self.local_epochs,
            self.batch_size,
            self.lr,
            self.momentum,
            self.weight_decay,
            self.buffers,
            self.dtype == "bfloat16",
            augment,
        )

    def to_toml(self) -> str:
        """The experiment with every default written out."""
        plain = self.model_dump(mode="json", exclude_none=True)
        return tomli_w.dumps({k: v for k, v in plain.items() if v != {}})


def make_objective(part: Part) -> Objective:
    """Objective from its table."""
    name, options = _split(part)
    return configure(find(OBJECTIVES, name, "objective"), options, f"objective {name}")


def describe_objective(objective: Objective, **changes: Any) -> Part:
    """The table that makes an objective, some of its options changed.

    >>> describe_objective(OBJECTIVES["marg-log"], lam=0.5)
    {'name': 'marg-log', 'lam': 0.5}
    """
    name = next(name for name, value in OBJECTIVES.items() if type(value) is type(objective))
    return {"name": name, **asdict(objective), **changes}


def _split(part: Part) -> tuple[str, Part]:
    return part["name"], {key: value for key, value in part.items() if key != "name"}


def _with_parts(method: Method, objective: Objective, rule: Rule) -> Method:
    from dataclasses import replace

    return replace(method, objective=objective, rule=rule)


def make_experiment(settings: dict[str, Any]) -> Experiment:
    """Check settings; an unknown key or a bad value is one sentence.

    >>> make_experiment({"roundz": 3})
    Traceback (most recent call last):
    fedld.errors.FedLDError: unknown setting 'roundz': did you mean 'rounds'?
    """
    for key in settings:
        if key not in Experiment.model_fields:
            raise FedLDError(f"unknown setting '{key}': {_suggest(key, settings)}")
    try:
        experiment = Experiment(**settings)
    except ValidationError as error:
        raise FedLDError(first_problem(error)) from None
    experiment.make_method()
    experiment.data_spec()
    experiment.training()
    return experiment


def _suggest(key: str, settings: dict[str, Any]) -> str:
    """Nearest setting; an option of the chosen method is offered as `method.option`."""
    part = settings.get("method", {"name": "fedavg"})
    name = part if isinstance(part, str) else part.get("name", "")
    if name in METHODS and key in options_of(METHODS[name]):
        return f"write 'method.{key}'"
    return nearest(key, list(Experiment.model_fields))


def read_toml(path: Path) -> dict[str, Any]:
    """Settings from a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FedLDError(f"there is no file '{path}'") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FedLDError(f"cannot read '{path}' as TOML: {error}") from None


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
        table, dot, inner = key.partition(".")
        if not dot:
            result[key] = _value(text)
            continue
        part = result.get(table, {"name": "fedavg"} if table == "method" else {})
        result[table] = {**({"name": part} if isinstance(part, str) else part), inner: _value(text)}
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
