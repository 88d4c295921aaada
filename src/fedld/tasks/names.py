"""All tasks by name."""

from fedld.registry import Registry, require_instance
from fedld.tasks.base import Task
from fedld.tasks.classification import Classification, Multilabel
from fedld.tasks.regression import AbsoluteRegression, Regression
from fedld.tasks.segmentation import Segmentation
from fedld.tasks.survival import Survival, SurvivalDiscrete

TASKS: Registry[Task] = Registry(
    "task",
    {
        task.name: task
        for task in (
            Classification(),
            Multilabel(),
            Regression(),
            AbsoluteRegression(),
            Segmentation(),
            Survival(),
            SurvivalDiscrete(),
        )
    },
    accept=require_instance("task", Task, "or a Task"),
)
TASKS.load_plugins()
