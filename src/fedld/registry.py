"""Values by name: methods, objectives and rules are frozen dataclasses, made from a name and options."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedld.errors import FedLDError, nearest

Value = TypeVar("Value")


def find(table: Mapping[str, Value], name: str, what: str) -> Value:
    """Entry of a table of named values; an unknown name is answered with the nearest valid one."""
    if name not in table:
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
    return replace(value, **{key: getattr(checked, key) for key in options})  # type: ignore[type-var]


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
