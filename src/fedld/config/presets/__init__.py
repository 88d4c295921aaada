"""The paper's experiments as TOML: settings of both scales, one lambda for all methods, a table a scale."""

import tomllib
from importlib.resources import files
from typing import Any

from fedld.config.resolve import describe_objective
from fedld.errors import unknown_name
from fedld.methods import METHODS

SCALES = ("paper", "small")


def names() -> list[str]:
    """List every preset in every scale: `retina-split1-paper`, `retina-split1-small`, ..."""
    presets = sorted(file.name.removesuffix(".toml") for file in _folder() if file.name.endswith(".toml"))
    return [f"{name}-{scale}" for name in presets for scale in SCALES]


def read_preset(name: str) -> dict[str, Any]:
    """Read the settings of a preset, which other settings may replace.

    >>> preset = read_preset("retina-split1-paper")
    >>> preset["model"], preset["rounds"], preset["fedld"]["objective"]["lam"]
    ('resnet50', 200, 0.1)
    """
    if name not in names():
        raise unknown_name("preset", name, names())
    stem, _, scale = name.rpartition("-")
    settings = tomllib.loads(files(__package__).joinpath(f"{stem}.toml").read_text(encoding="utf-8"))
    chosen: dict[str, Any] = settings[scale]
    shared = {key: value for key, value in settings.items() if key not in (*SCALES, "lam")}
    return shared | _margins(settings["lam"]) | chosen


def _margins(lam: float) -> dict[str, Any]:
    """Give the split's lambda to every method with margin control, as tables of single methods."""
    return {
        name: {"objective": describe_objective(method.objective, lam=lam)}
        for name, method in METHODS.items()
        if hasattr(method.objective, "lam")
    }


def _folder() -> list[Any]:
    return list(files(__package__).iterdir())
