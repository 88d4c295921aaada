"""What the methods that look inside the network share: its features, by class."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedld.errors import FedLDError
from fedld.local import LocalClient
from fedld.models import Model

BATCH = 256


def as_model(network: nn.Module) -> Model:
    """The network as one with features (`embed`) and a linear `head`."""
    if not isinstance(network, Model):
        raise FedLDError(f"this method needs features and a head, not {type(network).__name__}")
    return network


@dataclass(frozen=True)
class ClassFeatures:
    """Counts (C,), mean features (C, F) and mean |f|^2 (C,) of the training samples; zero without any."""

    counts: Tensor
    means: Tensor
    squares: Tensor


@torch.no_grad()
def by_class(client: LocalClient) -> ClassFeatures:
    """Features of the client's model as it is now, in eval mode, without augmentation."""
    model = as_model(client.model)
    model.eval()
    like, classes = client.weights, model.head.out_features
    counts, squares = like.new_zeros(classes), like.new_zeros(classes)
    sums = like.new_zeros(classes, model.head.in_features)
    for images, labels in client.samples.in_order(BATCH):
        features = model.embed(images).to(sums.dtype)
        sums.index_add_(0, labels, features)
        squares.index_add_(0, labels, features.square().sum(1))
        counts.index_add_(0, labels, torch.ones_like(labels, dtype=counts.dtype))
    return ClassFeatures(counts, sums / counts.clamp(min=1)[:, None], squares / counts.clamp(min=1))
