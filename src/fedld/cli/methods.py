"""`fedld methods`: what there is, where it comes from, what it needs."""

from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedld.aggregation import Rule
from fedld.engine.records import dump
from fedld.local import OBJECTIVES
from fedld.methods import METHODS, Method
from fedld.registry import options_of

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
    rows = [describe(name, method) for name, method in METHODS.items()]
    if json:
        typer.echo(dump(rows))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in COLUMNS.values():
        table.add_column(title, no_wrap=title == "name")
    words = {True: "yes", False: "no"}
    for row in rows:
        table.add_row(*(words.get(row[key], row[key]) for key in COLUMNS))
    Console().print(table)


def describe(name: str, method: Method) -> dict[str, Any]:
    """A method as plain data: its card, its parts, and the options it takes."""
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


def _changed(rule: Rule) -> dict[str, Any]:
    """Options that differ from the rule's own defaults."""
    values = {field.name: (getattr(rule, field.name), field.default) for field in fields(rule)}
    return {key: value for key, (value, default) in values.items() if value != default}
