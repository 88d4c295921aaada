"""Settings by name: the paper's experiments in two scales, one lambda for all methods; and fine-tuning."""

import tomllib
from importlib.resources import files
from typing import Any

from fedld.config.resolve import describe_objective
from fedld.errors import unknown_name
from fedld.methods import METHODS

SCALES = ("paper", "small")
FINE_TUNE = "fine-tune"


def names() -> list[str]:
    """List every preset: `fine-tune`, and the paper's in every scale: `retina-split1-paper`, ..."""
    presets = sorted(file.name.removesuffix(".toml") for file in _folder() if file.name.endswith(".toml"))
    return [
        *(f"{name}-{scale}" for name in presets if name != FINE_TUNE for scale in SCALES),
        FINE_TUNE,
    ]


def read_preset(name: str) -> dict[str, Any]:
    """Read the settings of a preset, which other settings may replace.

    >>> preset = read_preset("retina-split1-paper")
    >>> preset["model"], preset["rounds"], preset["fedld"]["objective"]["lam"]
    ('resnet50', 200, 0.1)
    >>> read_preset("fine-tune")["train"]
    'last:4'
    """
    if name not in names():
        raise unknown_name("preset", name, names())
    if name == FINE_TUNE:
        return _read(name)
    stem, _, scale = name.rpartition("-")
    settings = _read(stem)
    chosen: dict[str, Any] = settings[scale]
    shared = {key: value for key, value in settings.items() if key not in (*SCALES, "lam")}
    return shared | _margins(settings["lam"]) | chosen


def _read(stem: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath(f"{stem}.toml").read_text(encoding="utf-8"))


def _margins(lam: float) -> dict[str, Any]:
    """Give the split's lambda to every method with margin control, as tables of single methods."""
    return {
        name: {"objective": describe_objective(method.objective, lam=lam)}
        for name, method in METHODS.items()
        if hasattr(method.objective, "lam")
    }


def _folder() -> list[Any]:
    return list(files(__package__).iterdir())
