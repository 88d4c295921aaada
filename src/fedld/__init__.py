"""Federated learning on heterogeneous data: explain, train, prove, scale.

    result = fedld.run("fedld", "fundus-sim", rounds=10)
    study = fedld.compare(["fedavg", "fedld"], fedld.data("digits", clients=5), seeds=range(5))

Methods, objectives, rules, models, metrics, partitions and data may be names or your own values.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedld.aggregation import GramRule, Rule, aggregate
    from fedld.analysis.decomposition import decompose
    from fedld.api import auto, compare, diagnose, predict, report, run, tune
    from fedld.data import Federation
    from fedld.engine.backends.base import Backend, Engine
    from fedld.engine.backends.machine import ThisMachine
    from fedld.engine.callbacks import Callback, EarlyStopping
    from fedld.errors import FedLDError
    from fedld.frames import load
    from fedld.local import Context, ContextObjective, LocalClient, Objective, Reply
    from fedld.methods import Method
    from fedld.models import Model
    from fedld.results import Result, Study
    from fedld.study.trackers import Tracking
    from fedld.tasks import Measure, Metric

PLACES = {
    "fedld.api": ("auto", "compare", "diagnose", "predict", "report", "run", "tune"),
    "fedld.analysis.decomposition": ("decompose",),
    "fedld.results": ("Result", "Study"),
    "fedld.frames": ("load",),
    "fedld.data": ("Federation",),
    "fedld.engine.backends.base": ("Backend", "Engine"),
    "fedld.engine.backends.machine": ("ThisMachine",),
    "fedld.engine.callbacks": ("Callback", "EarlyStopping"),
    "fedld.methods": ("Method",),
    "fedld.models": ("Model",),
    "fedld.local": ("Context", "ContextObjective", "LocalClient", "Objective", "Reply"),
    "fedld.study.trackers": ("Tracking",),
    "fedld.tasks": ("Measure", "Metric"),
    "fedld.aggregation": ("GramRule", "Rule", "aggregate"),
    "fedld.errors": ("FedLDError",),
}
__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Callback",
    "Context",
    "ContextObjective",
    "EarlyStopping",
    "Engine",
    "FedLDError",
    "Federation",
    "GramRule",
    "LocalClient",
    "Measure",
    "Method",
    "Metric",
    "Model",
    "Objective",
    "Reply",
    "Result",
    "Rule",
    "Study",
    "ThisMachine",
    "Tracking",
    "__version__",
    "aggregate",
    "auto",
    "compare",
    "data",
    "decompose",
    "diagnose",
    "load",
    "predict",
    "report",
    "run",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that `import fedld` stays light."""
    for module, names in PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    if name == "data":  # a room that can be called: fedld.data("digits", clients=5)
        return import_module("fedld.data")
    raise AttributeError(f"module 'fedld' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
