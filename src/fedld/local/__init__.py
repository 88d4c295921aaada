"""The client side: objectives, samples, and the one training loop."""

from fedld.local.base import Context, ContextObjective, Objective, as_objective
from fedld.local.client import LocalClient, Reply, Training
from fedld.local.objectives import OBJECTIVES
from fedld.local.samples import FeatureSamples, RowSamples, Samples

__all__ = [
    "OBJECTIVES",
    "Context",
    "ContextObjective",
    "FeatureSamples",
    "LocalClient",
    "Objective",
    "Reply",
    "RowSamples",
    "Samples",
    "Training",
    "as_objective",
]
