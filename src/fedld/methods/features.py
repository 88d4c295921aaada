"""What the methods that look inside the network share: its features, by class."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedld.errors import FedLDError
from fedld.local import LocalClient
from fedld.local.samples import BATCH as BATCH
from fedld.models import as_model


@dataclass(frozen=True)
class ClassFeatures:
    """Counts (C,), mean features (C, F) and mean |f|^2 (C,) of the training samples; zero without any.

    Also zero for a class of which a site sends nothing by itself (`LocalClient.disclosed`).
    """

    counts: Tensor
    means: Tensor
    squares: Tensor


@torch.no_grad()
def by_class(client: LocalClient) -> ClassFeatures:
    """Compute features of the client's model as it is now, in eval mode, without augmentation."""
    model = as_model(client.model)
    like, classes = client.weights, model.head.out_features
    counts, squares = like.new_zeros(classes), like.new_zeros(classes)
    sums = like.new_zeros(classes, model.head.in_features)
    for embedded, labels in client.embedded():
        features = embedded.to(sums.dtype)
        sums.index_add_(0, labels, features)
        squares.index_add_(0, labels, features.square().sum(1))
        counts.index_add_(0, labels, torch.ones_like(labels, dtype=counts.dtype))
    counts = client.disclosed(counts)
    if not counts.any():
        raise FedLDError(f"no class has {client.smallest_class} samples, so its features by class stay there")
    sums, squares = sums * (counts > 0)[:, None], squares * (counts > 0)
    return ClassFeatures(counts, sums / counts.clamp(min=1)[:, None], squares / counts.clamp(min=1))
