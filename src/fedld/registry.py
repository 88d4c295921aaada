"""Values by name: built-in ones, those that installed packages add, and the user's own by import path."""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedld.errors import FedLDError, nearest

Value = TypeVar("Value")
LARGEST = 1e18  # that an option may be, either way


def find(table: Mapping[str, Value], name: str, what: str) -> Value:
    """Entry of a table of named values; an unknown name is answered with the nearest valid one."""
    if name not in table:
        if is_import_path(name):
            raise FedLDError(
                f"{what} '{name}' is not part of fedld and files may not import code: give it by hand, "
                f"--{what.replace('_', '-')} {name} on the command line or {what}=... in Python"
            )
        raise FedLDError(f"unknown {what} '{name}': {nearest(name, list(table))}")
    return table[name]


def configure(value: Value, options: Mapping[str, Any], what: str) -> Value:
    """Copy of a frozen dataclass with some fields set, each checked against its type.

    >>> from fedld.methods import METHODS
    >>> configure(METHODS["fedprox"], {"mu": 0.1}, "method fedprox").mu
    0.1
    >>> configure(METHODS["fedprox"], {"muu": 0.1}, "method fedprox")
    Traceback (most recent call last):
    fedld.errors.FedLDError: method fedprox has no option 'muu': did you mean 'mu'?
    """
    assert is_dataclass(value)
    known = {f.name: f for f in fields(value) if isinstance(getattr(value, f.name), int | float | str | None)}
    for key in options:
        if key not in known:
            hint = nearest(key, list(known)) if known else "it has none"
            raise FedLDError(f"{what} has no option '{key}': {hint}")
    try:
        checked = TypeAdapter(type(value)).validate_python({**_plain(value), **options})
    except (ValidationError, ValueError) as error:
        raise FedLDError(f"{what}: {first_problem(error)}") from None
    chosen = {key: getattr(checked, key) for key in options}
    for key, number in chosen.items():
        if isinstance(number, int | float) and not -LARGEST <= number <= LARGEST:
            raise FedLDError(
                f"{what}: {key} must be a finite number up to {LARGEST:g} in size, not {number:g}"
            )
    return replace(value, **chosen)  # type: ignore[type-var]


def options_of(value: Any) -> dict[str, Any]:
    """The plain options of a value: what a configuration file may set."""
    return {k: v for k, v in _plain(value).items() if isinstance(v, int | float | str | None)}


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def first_problem(error: ValidationError | ValueError) -> str:
    """The first problem of a validation error as one sentence."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    got = problem["input"]
    shown = f", not {got!r}" if isinstance(got, str | int | float | bool | None) else ""
    return f"{place}: {message[0].lower()}{message[1:]}{shown}" if place else message


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(name: str) -> bool:
    """Whether a name has the form `module:attribute`.

    >>> is_import_path("my_nets:make_net"), is_import_path("cnn"), is_import_path("npz:/data/x.npz")
    (True, False, False)
    """
    return IMPORT_PATH.fullmatch(name) is not None


def import_value(path: str, what: str) -> Any:
    """The value at an import path; call it only for a path that the user typed."""
    module, _, attribute = path.partition(":")
    try:
        value = import_module(module)
    except Exception as error:  # whatever the user's module raises
        raise FedLDError(f"{what} '{path}' cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise FedLDError(f"{what} '{path}' cannot be imported: '{module}' has no '{attribute}'")
        value = getattr(value, part)
    return value


def plugins(kind: str, fits: Callable[[Any], bool]) -> dict[str, Any]:
    """What installed packages add: the entry points of the group `fedld.<kind>`.

    A plugin that cannot be imported, or is of another kind, is left out with a warning that names it.
    """
    found = {}
    for entry in entry_points(group=f"fedld.{kind}"):
        try:
            value = entry.load()
        except Exception as error:  # a broken package must not break every command
            warnings.warn(f"fedld.{kind} plugin '{entry.name}' ({entry.value}): {error}", stacklevel=2)
            continue
        if fits(value):
            found[entry.name] = value
        else:
            text = f"fedld.{kind} plugin '{entry.name}' ({entry.value}) is a {type(value).__name__}"
            warnings.warn(text, stacklevel=2)
    return found


def name_of(value: Any) -> str:
    """Where a value, or else its type, is defined: `module:name`.

    >>> name_of(plugins), name_of(FedLDError("x"))
    ('fedld.registry:plugins', 'fedld.errors:FedLDError')
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def call_with(function: Callable[..., Any], what: str, **known: Any) -> Any:
    """Call a user's function with those of the known facts that it asks for by name.

    >>> call_with(lambda classes, width=8: (classes, width), "model", classes=3, channels=1)
    (3, 8)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**known)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in NAMED and p.name not in known]
    if missing:
        raise FedLDError(
            f"{what} '{name_of(function)}' needs an argument '{missing[0]}'; available arguments are: "
            f"{', '.join(known)}"
        )
    return function(**{p.name: known[p.name] for p in parameters if p.name in known})


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
