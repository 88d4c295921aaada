"""The experiment's settings as command-line options: one each, made from what it says of itself."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from fedld.config.experiment import RENAMED, SETTINGS, override, read_toml
from fedld.config.settings import Setting

PLAIN = (bool, int, float, Path, list[str])
TABLES = ("data", "client_lr")
"""Settings that are tables without a name: given as KEY=VALUE, any number of times."""


def with_settings(*without: str, many: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the experiment's options; it receives them merged as `settings`.

    Later wins: `--preset NAME`, `--config FILE`, then single options, then `--set key=value`. A command of
    `many` methods also receives the tables that are for one of them alone.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name in SETTINGS if name not in without]

        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            command_arguments = {name: arguments.pop(name) for name in names}
            files = _read(
                arguments.pop("preset"), arguments.pop("config"), command_arguments.get("method"), many
            )
            assignments = [
                f"{table}.{pair}" for table in TABLES for pair in command_arguments.pop(table) or []
            ]
            command_arguments |= {old: arguments.pop(old) for old in RENAMED}
            chosen = {name: value for name, value in command_arguments.items() if value is not None}
            assignments += arguments.pop("set_") or []
            if many and arguments.get("methods"):
                _check_methods(assignments, arguments["methods"])
            command(
                settings=_imported(override(files | chosen, assignments), chosen, assignments), **arguments
            )

        parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        options = [_option(SETTINGS[name]) for name in names]
        options += [_option(SETTINGS[new], old) for old, new in RENAMED.items()]
        wrapper.__signature__ = inspect.Signature([*parameters, *_config(), *options])  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _read(preset: str | None, config: Path | None, method: str | None, many: bool) -> dict[str, Any]:
    """Read the settings of the files; for a single method without the tables of others."""
    from fedld.config.presets import read_preset
    from fedld.study.compare import of_one_method

    settings = (read_preset(preset) if preset else {}) | (read_toml(config) if config else {})
    return settings if many else of_one_method(settings, method)


def _imported(settings: dict[str, Any], chosen: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """Import the values of typed import paths into settings; import paths in files are refused."""
    from fedld.config.own import import_typed

    words = [word for value in chosen.values() for word in (value if isinstance(value, list) else [value])]
    return import_typed(settings, {*map(str, words), *(pair.partition("=")[2] for pair in assignments)})


def _check_methods(assignments: list[str], methods: str) -> None:
    """Refuse `--set fedprox.mu=0.1` where FedProx is not among the methods."""
    from fedld.study.compare import check_own_tables

    keys = [pair.partition("=")[0] for pair in assignments]
    tables = [key.partition(".")[0] for key in keys if "." in key]
    check_own_tables(tables, [name.rpartition("=")[2].strip() for name in methods.split(",")])


def _option(setting: Setting, old: str | None = None) -> inspect.Parameter:
    """Make the option of a setting, or the hidden one of its old name."""
    kinds = [
        setting.annotation,
        *(getattr(kind, "__origin__", kind) for kind in get_args(setting.annotation)),
    ]
    worded = Literal in kinds  # a number or a word: the experiment distinguishes them
    kind: Any = str if worded else next((kind for kind in PLAIN if kind in kinds), str)
    if setting.name in TABLES:
        kind = list[str]
    names = [setting.option] if kind == list[str] else []  # the others are named after the parameter
    option = typer.Option(
        *names, help=setting.help, rich_help_panel=setting.section.capitalize(), hidden=old is not None
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        old or setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _config() -> list[inspect.Parameter]:
    preset = Annotated[str | None, typer.Option(help="settings by name, e.g. fine-tune, retina-split1-small")]
    config = Annotated[Path | None, typer.Option(help="settings from a TOML file")]
    sets = Annotated[
        list[str] | None, typer.Option("--set", help="any setting: key=value or table.key=value")
    ]
    return [
        inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=preset),
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config),
        inspect.Parameter("set_", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=sets),
    ]
