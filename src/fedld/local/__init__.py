"""The client side: objectives, samples, and the one SGD loop."""

from fedld.local.client import LocalClient, Reply, Training
from fedld.local.objectives import OBJECTIVES, Objective
from fedld.local.samples import Samples

__all__ = ["OBJECTIVES", "LocalClient", "Objective", "Reply", "Samples", "Training"]
