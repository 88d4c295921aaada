"""`fedld methods`: what there is, where it comes from, what it needs."""

import json as json_format
from contextlib import suppress
from dataclasses import asdict, fields
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedld import __version__
from fedld.errors import FedLDError
from fedld.paths import cache_root
from fedld.records.writer import dump, write_atomically

if TYPE_CHECKING:
    from fedld.aggregation import Rule
    from fedld.methods import Method

COLUMNS = {
    "name": "name",
    "paper": "paper",
    "personal": "personal",
    "communication": "extra communication",
    "batchnorm": "BN",
    "sampling": "sampling",
}


def methods(json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False) -> None:
    """List every method: paper, what is personal, extra communication, BatchNorm and client sampling."""
    rows = known_methods()
    if json:
        typer.echo(dump(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in COLUMNS.values():
        table.add_column(title, no_wrap=title == "name")
    words = {True: "yes", False: "no"}
    for row in rows:
        table.add_row(*(words.get(row[key], row[key]) for key in COLUMNS))
    Console().print(table)


def known_methods() -> list[dict[str, Any]]:
    """Describe every method as plain data; cached, since methods need torch, which takes seconds to import.

    What installed packages add is always asked for anew.
    """
    if entry_points(group="fedld.methods"):
        return _described()
    package = Path(__file__).parents[1]
    places = [file for room in ("methods", "local", "aggregation") for file in (package / room).glob("*.py")]
    plugins = [(str(file), file.stat().st_mtime_ns) for file in sorted(places)]
    key = sha256(repr((__version__, plugins)).encode()).hexdigest()
    name = f"methods-{key[:20]}.json"
    try:
        return list(json_format.loads((cache_root() / name).read_text()))
    except (FedLDError, OSError, ValueError):
        rows = _described()
    with suppress(FedLDError, OSError):  # a cache that cannot be written is none
        write_atomically(cache_root() / name, dump(rows).encode())
    return rows


def _described() -> list[dict[str, Any]]:
    from fedld.methods import METHODS

    return [describe(name, method) for name, method in METHODS.items()]


def describe(name: str, method: "Method") -> dict[str, Any]:
    """Describe a method as plain data: its card, its parts, and the options it takes."""
    from fedld.local import OBJECTIVES
    from fedld.registry import options_of

    kind = type(method.objective)
    objective = next((key for key, value in OBJECTIVES.items() if type(value) is kind), kind.__name__)
    return {
        "name": name,
        **asdict(method.card),
        "objective": objective,
        "rule": {"name": method.rule.name, **_changed(method.rule)},
        "personalised": method.personalised,
        "global_model": method.has_global,
        "options": options_of(method),
    }


def _changed(rule: "Rule") -> dict[str, Any]:
    """List options that differ from the rule's own defaults."""
    values = {field.name: (getattr(rule, field.name), field.default) for field in fields(rule)}
    return {key: value for key, (value, default) in values.items() if value != default}
