"""What is learned and how it is judged: tasks, tallies, measures.

Names are found on first use, because data frames need measures without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedld.tasks.base import Task
    from fedld.tasks.classification import Classification
    from fedld.tasks.measure import Measure, Tally
    from fedld.tasks.metrics import METRICS, Metric, as_metric
    from fedld.tasks.names import TASKS

PLACES = {
    "fedld.tasks.base": ("Task",),
    "fedld.tasks.classification": ("Classification",),
    "fedld.tasks.measure": ("Measure", "Tally"),
    "fedld.tasks.metrics": ("METRICS", "Metric", "as_metric"),
    "fedld.tasks.names": ("TASKS",),
}
__all__ = ["METRICS", "TASKS", "Classification", "Measure", "Metric", "Tally", "Task", "as_metric"]


def __getattr__(name: str) -> Any:
    for module, names in PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'fedld.tasks' has no attribute '{name}'")
