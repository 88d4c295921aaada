"""Values by name: built-in ones, those that installed packages add, and the user's own by import path."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedld.errors import FedLDError, nearest, unknown_name

Value = TypeVar("Value")
Instance = TypeVar("Instance")
LARGEST = 1e18  # that an option may be, either way


class Registry(dict[str, Value]):
    """The parts of one kind by name: built-in ones, registered ones, and those of installed packages.

    A part of the user's goes in the place of a name: as a value in Python, as `module:attribute` on the
    command line, or under a name after `register`. An installed package names its parts as entry points of
    the group `fedld.<kind>s`.

    Args:
        kind: what one part is called in sentences.
        values: the built-in parts.
        accept: returns a user's value as a part of this kind, or raises a FedLDError.
        accept_entry: the same for a value that gets a name; default: `accept`.
        reserved: further valid names, which stand for no value of this table. A name that ends with a colon
            needs an argument, like `folder:xrays`.
        with_argument: names that may have an argument, like `quantise:8`.

    >>> import math
    >>> accept = require_callable("rounding", "or a function")
    >>> rounding = Registry("rounding", {"up": math.ceil}, accept=accept)
    >>> rounding.register("down", math.floor)
    >>> rounding.find("down")(2.5), rounding.resolve(math.trunc)(2.5)
    (2, 2)
    >>> rounding.find("dwn")
    Traceback (most recent call last):
    fedld.errors.FedLDError: unknown rounding 'dwn': did you mean 'down'?
    >>> rounding.resolve(3)
    Traceback (most recent call last):
    fedld.errors.FedLDError: rounding is a name, or a function, not int 3
    """

    def __init__(
        self,
        kind: str,
        values: Mapping[str, Value],
        *,
        accept: Callable[[Any], Any],
        accept_entry: Callable[[Any], Value] | None = None,
        reserved: Iterable[str] = (),
        with_argument: Iterable[str] = (),
    ) -> None:
        super().__init__(values)
        self.kind = kind
        self.accept = accept
        self.accept_entry = accept_entry or accept
        self.reserved = tuple(reserved)
        self.with_argument = frozenset(with_argument)

    @property
    def names(self) -> list[str]:
        """All valid names."""
        return list(dict.fromkeys([*self, *self.reserved]))

    def register(self, name: str, value: Any) -> None:
        """Give a part a name.

        Args:
            name: a new name.
            value: the part.

        Raises:
            FedLDError: the name is taken, or the value is no part of this kind.
        """
        if self.recognises(name):
            raise FedLDError(f"there is a {self.kind} '{name}' already")
        self[name] = self.accept_entry(value)

    def recognises(self, name: str) -> bool:
        """Tell whether a name is valid, alone or with its argument."""
        head, colon, _ = name.partition(":")
        return name in self.names or (
            bool(colon) and (head in self.with_argument or head + ":" in self.names)
        )

    def check(self, name: str) -> None:
        """Check a name.

        Raises:
            FedLDError: it stands for nothing, or it is an import path, which only a user may give.
        """
        if self.recognises(name):
            return
        head = name.partition(":")[0] + ":"
        mistyped = ":" in name and get_close_matches(head, [valid for valid in self.names if ":" in valid])
        if is_import_path(name) and not mistyped:
            raise FedLDError(
                f"{self.kind} '{name}' is not part of fedld and files may not import code: give it by hand, "
                f"--{self.kind.replace('_', '-')} {name} on the command line or {self.kind}=... in Python"
            )
        raise unknown_name(self.kind, head if mistyped else name, self.names)

    def find(self, name: str) -> Value:
        """Return the part of this name.

        Raises:
            FedLDError: there is none.
        """
        self.check(name)
        if name not in self:
            raise FedLDError(f"{self.kind} '{name}' cannot be used here: take {', '.join(self)}")
        return self[name]

    def resolve(self, value: Any) -> Any:
        """Return the part of a name, or a user's value as a part."""
        return self.find(value) if isinstance(value, str) else self.accept(value)

    def load_plugins(self) -> None:
        """Add the parts of installed packages.

        One that cannot be imported, or is of another kind, is left out with a warning that names it.
        """
        for entry in _entry_points().select(group=f"fedld.{self.kind}s"):
            try:
                self[entry.name] = self.accept_entry(entry.load())
            except Exception as error:  # a broken package must not break every command
                text = f"fedld.{self.kind}s plugin '{entry.name}' ({entry.value}): {error}"
                warnings.warn(text, stacklevel=2)


@cache
def _entry_points() -> Any:  # SelectableGroups in Python 3.11, EntryPoints later
    """Read what installed packages declare, once for all kinds."""
    return entry_points()


def wrong_part(kind: str, forms: str, value: Any) -> FedLDError:
    """Make the error about a value that is no part of a kind."""
    return FedLDError(f"{kind} is a name, {forms}, not {type(value).__name__} {value!r:.80}")


def require_instance(kind: str, base: type[Instance], forms: str) -> Callable[[Any], Instance]:
    """Make the check of a registry in which a part is an instance of a class, or a subclass with defaults."""

    def accept(value: Any) -> Instance:
        value = value() if isinstance(value, type) and issubclass(value, base) else value
        if not isinstance(value, base):
            raise wrong_part(kind, forms, value)
        return value

    return accept


def require_subclass(kind: str, base: type[Instance]) -> Callable[[Any], type[Instance]]:
    """Make the check of a registry in which names stand for classes."""

    def accept(value: Any) -> type[Instance]:
        if not isinstance(value, type) or not issubclass(value, base):
            raise wrong_part(kind, f"or a subclass of {base.__name__}", value)
        return value

    return accept


def require_callable(kind: str, forms: str) -> Callable[[Any], Any]:
    """Make the check of a registry in which a part is a function."""

    def accept(value: Any) -> Any:
        if not callable(value):
            raise wrong_part(kind, forms, value)
        return value

    return accept


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
    by_name = {
        f.name: f for f in fields(value) if isinstance(getattr(value, f.name), int | float | str | None)
    }
    for key in options:
        if key not in by_name:
            hint = nearest(key, list(by_name)) if by_name else "it has none"
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
    """List the plain options of a value: what a configuration file may set."""
    return {k: v for k, v in _plain(value).items() if isinstance(v, int | float | str | None)}


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)}


def first_problem(error: ValidationError | ValueError) -> str:
    """Describe the first problem of a validation error in one sentence."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    got = problem["input"]
    value_text = f", not {got!r}" if isinstance(got, str | int | float | bool | None) else ""
    return f"{place}: {message[0].lower()}{message[1:]}{value_text}" if place else message


IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import_path(name: str) -> bool:
    """Tell whether a name has the form `module:attribute`.

    >>> is_import_path("my_nets:make_net"), is_import_path("cnn"), is_import_path("npz:/data/x.npz")
    (True, False, False)
    """
    return IMPORT_PATH.fullmatch(name) is not None


def import_value(path: str, what: str) -> Any:
    """Import the value at an import path; call it only for a path that the user typed."""
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


def name_of(value: Any) -> str:
    """Name the place where a value, or else its type, is defined: `module:name`.

    >>> name_of(configure), name_of(FedLDError("x"))
    ('fedld.registry:configure', 'fedld.errors:FedLDError')
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def call_with(function: Callable[..., Any], what: str, **available: Any) -> Any:
    """Call a user's function with those of the available arguments that it has parameters for.

    >>> call_with(lambda classes, width=8: (classes, width), "model", classes=3, channels=1)
    (3, 8)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return function()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**available)
    missing = [
        p.name for p in parameters if p.default is p.empty and p.kind in NAMED and p.name not in available
    ]
    if missing:
        raise FedLDError(
            f"{what} '{name_of(function)}' needs an argument '{missing[0]}'; available arguments are: "
            f"{', '.join(available)}"
        )
    return function(**{p.name: available[p.name] for p in parameters if p.name in available})


NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
