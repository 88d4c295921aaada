"""The features of a client's samples, computed once for all who look at them."""

import torch
from torch import Tensor

from fedld.layout import FlatModel
from fedld.local.samples import Batch, Samples
from fedld.models import as_model

BATCH = 256


class Embedding:
    """Remembers the features of some samples under one model; with any other weights they are computed anew.

    A method that reads features (FedPAC) asks for those of the incoming and of the trained model, and so does
    whoever measures the losses of these two models.
    """

    def __init__(self) -> None:
        self._weights: Tensor | None = None
        self._batches: list[Batch] = []

    @torch.no_grad()
    def batches(self, flat: FlatModel, samples: Samples) -> list[Batch]:
        """Features and labels of all samples in order, in eval mode, without augmentation."""
        if self._weights is None or not torch.equal(self._weights, flat.vector):
            model = as_model(flat.model)
            model.eval()
            self._batches = [(model.embed(images), labels) for images, labels in samples.in_order(BATCH)]
            self._weights = flat.vector.clone()
        return self._batches
