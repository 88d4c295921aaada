"""A user's own parts: values in the place of names. The experiment keeps their names, and them beside it.

A value that fedld could make itself from a name and options is written down as such; any other is called by
where it is defined (`my_nets:Net`), and whoever resumes the run passes it again.
"""

import pickle
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedld.aggregation import RULES
from fedld.data import AUGMENTATIONS, DATASETS, PARTITIONS, Federation
from fedld.errors import FedLDError
from fedld.local import OBJECTIVES
from fedld.local.optimiser import SCHEDULES
from fedld.methods import METHODS
from fedld.models import MODELS
from fedld.registry import Registry, import_value, is_import_path, name_of, options_of, wrong_part
from fedld.tasks import METRICS, TASKS
from fedld.transforms import TRANSFORMS, UpdateTransform

Own = Mapping[str, Any]
"""Values by the setting that names them."""

REGISTRIES: dict[str, Registry[Any]] = {
    "method": METHODS,
    "objective": OBJECTIVES,
    "rule": RULES,
    "model": MODELS,
    "dataset": DATASETS,
    "partition": PARTITIONS,
    "task": TASKS,
    "lr_schedule": SCHEDULES,
    "augment": AUGMENTATIONS,
    "metrics": METRICS,
    "transform": TRANSFORMS,
}
"""Settings in which a value may stand in the place of a name, with the parts that names stand for."""
NAMES_ONLY = ("model", "dataset", "partition", "task", "lr_schedule", "augment")
"""Settings that are a name or a value, and never a table of options."""


@dataclass(frozen=True)
class Imported:
    """A value that the user asked for by import path, with options that are set on it."""

    path: str
    value: Any
    options: Mapping[str, Any]


def name_values(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace values in settings by names; gives the settings, and the values that have no built-in name."""
    named: dict[str, Any] = dict(settings)
    own_values: dict[str, Any] = {}
    for kind in REGISTRIES:
        value = settings.get(kind)
        if kind in LISTS and value is not None:
            named[kind], listed = _listed(kind, value)
            own_values |= {kind: listed} if listed else {}
        elif isinstance(value, Imported):
            own_values[kind] = REGISTRIES[kind].accept(value.value)
            table = {"name": value.path, **value.options}
            named[kind] = table if kind in ("method", "objective", "rule") else value.path
        elif isinstance(value, dict) and kind in NAMES_ONLY:
            raise wrong_part(kind, "or a value", value)
        elif value is not None and not isinstance(value, str | dict):
            value = REGISTRIES[kind].accept(value)
            named[kind], built_in = _describe(kind, value)
            own_values |= {} if built_in else {kind: value}
    return named, own_values


def import_typed(settings: Mapping[str, Any], typed: Collection[str]) -> dict[str, Any]:
    """Import the values of import paths that the user typed; a path in a file is refused."""
    result = dict(settings)
    for kind in REGISTRIES:
        value = settings.get(kind)
        if kind in LISTS:
            listed = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            names_to_import = [name for name in listed if isinstance(name, str)]
            result |= (
                {kind: [_take(name, typed, kind, {}) for name in names_to_import]} if names_to_import else {}
            )
            continue
        options = dict(value) if isinstance(value, dict) else {"name": value}
        name = options.pop("name", None)
        if isinstance(name, str):
            taken = _take(name, typed, kind, options)
            result |= {kind: taken} if isinstance(taken, Imported) else {}
    return result


def import_methods(names: Sequence[str]) -> list[Any]:
    """Import the methods that the user typed as import paths; names stay names."""
    return [_take(name, names, "method", {}) for name in names]


def _take(name: str, typed: Collection[str], kind: str, options: Mapping[str, Any]) -> Any:
    if not is_import_path(name) or REGISTRIES[kind].recognises(name):
        return name
    part = REGISTRIES[kind].kind
    if name not in typed:
        raise FedLDError(
            f"{part} '{name}' comes from a file, which may not import code: give "
            f"--{part.replace('_', '-')} {name} too"
        )
    here = str(Path.cwd())
    if here not in sys.path:  # a module beside the user, whatever started this process
        sys.path.insert(0, here)
    return Imported(name, import_value(name, part), options)


LISTS = ("metrics", "transform")
"""Settings that name several values."""


def _listed(kind: str, values: Any) -> tuple[list[str], dict[str, Any]]:
    """Name metrics or transforms, and give the user's own values among them."""
    if isinstance(values, str | UpdateTransform) or callable(values):
        values = [values]
    if not isinstance(values, Mapping | list | tuple):
        raise FedLDError(f"{kind} must be a list or a table, not {values!r}")
    named = values if isinstance(values, Mapping) else {_name_in_list(value): value for value in values}
    own_values = {
        name: REGISTRIES[kind].accept(value.value if isinstance(value, Imported) else value)
        for name, value in named.items()
        if not isinstance(value, str)
    }
    return list(named), own_values


def _name_in_list(value: Any) -> str:
    if isinstance(value, str):
        return value
    return value.path if isinstance(value, Imported) else name_of(getattr(value, "sums", value))


def _describe(kind: str, value: Any) -> tuple[Any, bool]:
    """Describe a value for the settings, and tell whether the description suffices to make it again."""
    if kind == "augment":
        return name_of(value.function), False
    if kind in ("model", "partition", "lr_schedule", "task"):
        return name_of(value), False
    if kind == "dataset":
        return (value.name if isinstance(value, Federation) else name_of(value)), False
    options = {key: option for key, option in options_of(value).items() if option is not None}
    if kind == "rule":
        made = RULES.get(getattr(value, "name", ""))
        return {"name": value.name if made else name_of(value), **options}, made is type(value)
    for name, entry in REGISTRIES[kind].items():
        if type(entry) is type(value) and replace(entry, **options_of(value)) == value:
            return {"name": name, **options}, True
    return {"name": name_of(getattr(value, "function", value)), **options}, False


def stays_here(own: Own, processes_wanted: bool) -> str | None:
    """Explain why these values do not go to worker processes; None if they do.

    A worker process runs the user's script again to find what is defined in it. That is done only for a user
    who `asked` for workers, in a script that has `if __name__ == "__main__":`.
    """
    for kind, value in own.items():
        name = _shown_name(value)
        try:
            content = pickle.dumps(value)
        except Exception as error:  # closures, open files, whatever the user's value holds
            return f"{kind} '{name}' cannot be sent to worker processes ({error})"
        if b"__main__" not in content:
            continue
        if not processes_wanted or not hasattr(sys.modules["__main__"], "__file__"):
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
            name = _shown_name(value)
            raise FedLDError(f"{kind} '{name}' cannot be sent to a cluster's workers ({error})") from None


def _shown_name(value: Any) -> str:
    """Name where a value is defined; several values by a list of names."""
    return ", ".join(value) if isinstance(value, Mapping) else name_of(getattr(value, "function", value))


def _script_is_guarded() -> bool:
    """Tell whether the calling script names `__main__`, so that an import of it starts no run."""
    try:
        return b"__main__" in Path(str(sys.modules["__main__"].__file__)).read_bytes()
    except OSError:
        return True
