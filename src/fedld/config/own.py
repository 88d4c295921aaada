"""A user's own parts: values in the place of names. The experiment keeps their names, and them beside it.

A value that fedld could make itself from a name and options is written down as such; any other is called by
where it is defined (`my_nets:Net`), and whoever resumes the run passes it again.
"""

import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedld.aggregation import RULES, Rule
from fedld.data import DATASETS, Federation, as_augmentation
from fedld.errors import FedLDError
from fedld.local import OBJECTIVES, as_objective
from fedld.methods import METHODS, Method
from fedld.models.unet import NAME as UNET
from fedld.registry import import_value, is_import_path, name_of, options_of
from fedld.tasks import as_metric
from fedld.transforms import TRANSFORMS, UpdateTransform, as_transform

Own = Mapping[str, Any]
"""Values by the setting that names them."""

KINDS = (
    "method",
    "objective",
    "rule",
    "model",
    "dataset",
    "partition",
    "lr_schedule",
    "augment",
    "metrics",
    "transform",
)
NAMES_ONLY = ("model", "dataset", "partition", "lr_schedule", "augment")
"""Settings that are a name or a value, and never a table of options."""


@dataclass(frozen=True)
class Imported:
    """A value that the user asked for by import path, with options that are set on it."""

    path: str
    value: Any
    options: Mapping[str, Any]


def name_values(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings in which everything is named, and the values that only their owner has."""
    named: dict[str, Any] = dict(settings)
    own: dict[str, Any] = {}
    for kind in KINDS:
        given = settings.get(kind)
        if kind in LISTS and given is not None:
            named[kind], own_values = _listed(kind, given)
            own |= {kind: own_values} if own_values else {}
        elif isinstance(given, Imported):
            own[kind] = CHECKS[kind](given.value)
            table = {"name": given.path, **given.options}
            named[kind] = table if kind in ("method", "objective", "rule") else given.path
        elif isinstance(given, dict) and kind in NAMES_ONLY:
            raise _wrong(kind, "or a value", given)
        elif given is not None and not isinstance(given, str | dict):
            value = CHECKS[kind](given)
            named[kind], built_in = _describe(kind, value)
            own |= {} if built_in else {kind: value}
    return named, own


def import_typed(settings: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Settings with the values of import paths that the user typed; a path of a file is refused."""
    result = dict(settings)
    for kind in KINDS:
        given = settings.get(kind)
        if kind in LISTS:
            listed = [given] if isinstance(given, str) else given if isinstance(given, list) else []
            asked = [name for name in listed if isinstance(name, str)]
            result |= {kind: [_take(name, typed, LISTS[kind], {}) for name in asked]} if asked else {}
            continue
        options = dict(given) if isinstance(given, dict) else {"name": given}
        name = options.pop("name", None)
        if isinstance(name, str):
            taken = _take(name, typed, kind, options)
            result |= {kind: taken} if isinstance(taken, Imported) else {}
    return result


def import_methods(names: Sequence[str]) -> list[Any]:
    """Names of methods that the user typed, with the values of those that are import paths."""
    return [_take(name, names, "method", {}) for name in names]


def _take(name: str, typed: Collection[str], kind: str, options: Mapping[str, Any]) -> Any:
    if not is_import_path(name) or _is_known(kind, name):
        return name
    if name not in typed:
        raise FedLDError(
            f"{kind} '{name}' comes from a file, which may not import code: give "
            f"--{kind.replace('_', '-')} {name} too"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # a module beside the user, whatever started this process
        sys.path.insert(0, here)
    return Imported(name, import_value(name, kind), options)


def _is_known(kind: str, name: str) -> bool:
    """`folder:xrays` and `column:hospital` look like import paths, but are names of ours."""
    head = name.split(":")[0] + ":"
    if kind == "transform":
        return head[:-1] in TRANSFORMS
    if kind == "model":
        return head[:-1] == UNET
    return (kind == "dataset" and head in DATASETS) or (kind == "partition" and head == "column:")


def _wrong(kind: str, what: str, value: Any) -> FedLDError:
    return FedLDError(f"{kind} is a name, {what}, not {type(value).__name__} {value!r:.80}")


def _as_method(value: Any) -> Method:
    value = value() if isinstance(value, type) and issubclass(value, Method) else value
    if not isinstance(value, Method):
        raise _wrong("method", "or a Method", value)
    return value


def _as_rule(value: Any) -> Rule:
    value = value() if isinstance(value, type) and issubclass(value, Rule) else value
    if not isinstance(value, Rule):
        raise _wrong("rule", "or a Rule", value)
    return value


def _as_model(value: Any) -> nn.Module | Callable[..., nn.Module]:
    if not callable(value):
        raise _wrong("model", "a torch module, or a function that makes one", value)
    return value  # type: ignore[no-any-return]


def _as_dataset(value: Any) -> Any:
    if not isinstance(value, Federation) and not callable(value):
        raise _wrong("dataset", "a Federation, or a function that makes one", value)
    return value


def _as_partition(value: Any) -> Any:
    if not callable(value):
        raise _wrong("partition", "or a function from labels to one array of places per client", value)
    return value


def _as_schedule(value: Any) -> Any:
    if not callable(value):
        raise _wrong("lr_schedule", "or a function from the round (1, 2, ...) to a factor of lr", value)
    return value


CHECKS: dict[str, Callable[[Any], Any]] = {
    "method": _as_method,
    "objective": as_objective,
    "rule": _as_rule,
    "model": _as_model,
    "dataset": _as_dataset,
    "partition": _as_partition,
    "lr_schedule": _as_schedule,
    "augment": as_augmentation,
}


LISTS = {"metrics": "metric", "transform": "transform"}
"""Settings that name several values, and what one of them is called."""


def _listed(kind: str, given: Any) -> tuple[list[str], dict[str, Any]]:
    """Names of metrics or transforms, and those among them that are the user's own."""
    if isinstance(given, str | UpdateTransform) or callable(given):
        given = [given]
    if not isinstance(given, Mapping | list | tuple):
        raise FedLDError(f"{kind} must be a list or a table, not {given!r}")
    check = as_metric if kind == "metrics" else as_transform
    named = given if isinstance(given, Mapping) else {_name_in_list(one): one for one in given}
    own = {
        name: check(one.value if isinstance(one, Imported) else one)
        for name, one in named.items()
        if not isinstance(one, str)
    }
    return list(named), own


def _name_in_list(one: Any) -> str:
    if isinstance(one, str):
        return one
    return one.path if isinstance(one, Imported) else name_of(getattr(one, "sums", one))


def _describe(kind: str, value: Any) -> tuple[Any, bool]:
    """What stands for a value in the settings, and whether that is enough to make it again."""
    if kind == "augment":
        return name_of(value.function), False
    if kind in ("model", "partition", "lr_schedule"):
        return name_of(value), False
    if kind == "dataset":
        return (value.name if isinstance(value, Federation) else name_of(value)), False
    options = {key: option for key, option in options_of(value).items() if option is not None}
    if kind == "rule":
        made = RULES.get(getattr(value, "name", ""))
        return {"name": value.name if made else name_of(value), **options}, made is type(value)
    table: Mapping[str, Any] = METHODS if kind == "method" else OBJECTIVES
    for name, entry in table.items():
        if type(entry) is type(value) and replace(entry, **options_of(value)) == value:
            return {"name": name, **options}, True
    return {"name": name_of(getattr(value, "function", value)), **options}, False


def stays_here(own: Own, asked: bool) -> str | None:
    """Why these values do not go to worker processes, or None if they do.

    A worker process runs the user's script again to find what is defined in it. That is done only for a user
    who `asked` for workers, in a script that has `if __name__ == "__main__":`.
    """
    for kind, value in own.items():
        name = name_of(getattr(value, "function", value))
        try:
            content = pickle.dumps(value)
        except Exception as error:  # closures, open files, whatever the user's value holds
            return f"{kind} '{name}' cannot be sent to worker processes ({error})"
        if b"__main__" not in content:
            continue
        if not asked or not hasattr(sys.modules["__main__"], "__file__"):
            return f"{kind} '{name}' is not defined in a module, from which worker processes could import it"
        if not _script_is_guarded():
            return f"{kind} '{name}' is defined in a script without `if __name__ == \"__main__\":`"
    return None


def check_portable(own: Own) -> None:
    """Check that values can be sent to other machines, where a script's own definitions go along.

    Raises:
        FedLDError: one of them cannot.
    """
    import cloudpickle  # comes with Dask

    for kind, value in own.items():
        try:
            cloudpickle.dumps(value)
        except Exception as error:  # open files, locks, whatever the user's value holds
            name = name_of(getattr(value, "function", value))
            raise FedLDError(f"{kind} '{name}' cannot be sent to a cluster's workers ({error})") from None


def _script_is_guarded() -> bool:
    """Whether the text of the calling script names `__main__`, so that an import of it starts no run."""
    try:
        return b"__main__" in Path(str(sys.modules["__main__"].__file__)).read_bytes()
    except OSError:
        return True
