from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.errors import FedLDError
from fedld.layout import Layout, Tree
from fedld.local import LocalClient
from fedld.methods.base import Card, Messages, Method, Server
from fedld.methods.features import BATCH
from fedld.models import as_model, head_names
from fedld.seeds import torch_generator


@dataclass(frozen=True)
class CCVR(Method):
    """FedAvg, and after its last round a calibration of the classifier with virtual representations.

    Clients send the mean and covariance of the features of each class under the final model. The server
    merges them into one Gaussian a class (Eq. 4 and 5 of the paper), draws `samples` features from each and
    trains the head on them: `epochs` of SGD from where it is. The rest of the network stays.
    """

    samples: int = 100
    epochs: int = 10
    lr: float = 0.01

    card: ClassVar[Card] = Card("CCVR", "Luo et al. 2021", communication="class means and covariances, once")
    calibrates: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and, as its last layer, a head."""
        names = [name for name, _ in model.named_parameters()]
        if head_names(as_model(model)) != names[-2:]:
            raise FedLDError(f"{self.card.title} needs a network that ends in its head")

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Locate the head: its weight (C, F) and bias (C,) are the last parameters."""
        weight, bias = [entry for entry in layout.entries if entry.kind == "parameter"][-2:]
        return Server(weights, {"head": torch.tensor([weight.start, bias.start, *weight.shape])})

    @torch.no_grad()
    def prepare(self, client: LocalClient) -> Tree:
        """Compute counts (C,), means (C, F) and covariances (C, F, F) of the client's features by class."""
        model, batches = as_model(client.model), client.embedded()
        features, labels = torch.cat([f.double() for f, _ in batches]), torch.cat([y for _, y in batches])
        classes, width = model.head.weight.shape
        counts, means = features.new_zeros(classes), features.new_zeros(classes, width)
        covariances = features.new_zeros(classes, width, width)
        for c in client.disclosed(torch.bincount(labels)).nonzero().flatten().tolist():
            class_features = features[labels == c]
            counts[c], means[c] = len(class_features), class_features.mean(0)
            covariances[c] = (
                (class_features - means[c]).T @ (class_features - means[c]) / max(len(class_features) - 1, 1)
            )
        return {"counts": counts, "means": means, "covariances": covariances}

    def calibrate(self, server: Server, messages: Messages) -> Server:
        """Train the global model's head on virtual features."""
        counts, means, covariances = (messages.stack(key) for key in ("counts", "means", "covariances"))
        weight_at, bias_at, classes, width = server.extra["head"].tolist()
        drawn, labels = [], []
        generator = torch_generator(0, "ccvr")
        for c in range(classes):
            if counts[:, c].sum() >= 2:
                mean, covariance = merged(counts[:, c], means[:, c], covariances[:, c])
                drawn.append(virtual(mean, covariance, self.samples, generator))
                labels += [c] * self.samples
        if not drawn:
            return server
        weights = server.weights.clone()
        weight = weights[weight_at : weight_at + classes * width].view(classes, width)
        bias = weights[bias_at : bias_at + classes]
        features = torch.cat(drawn).to(weights.dtype)
        self.fit(weight, bias, features, torch.tensor(labels), generator=generator)
        return replace(server, weights=weights)

    def fit(self, weight: Tensor, bias: Tensor, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """Fit softmax regression by plain SGD, in place; a convex problem with gradient (softmax - y) x."""
        for _ in range(self.epochs):
            for part in torch.split(torch.randperm(len(y), generator=generator), BATCH):
                slope = (F.linear(x[part], weight, bias).softmax(1) - F.one_hot(y[part], len(bias))) / len(
                    part
                )
                weight -= self.lr * slope.T @ x[part]
                bias -= self.lr * slope.sum(0)


def merged(n: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor]:
    """Merge every client's mean and covariance into those of all features (Eq. 4 and 5)."""
    total = n.sum()
    mean = n @ means / total
    within = torch.tensordot((n - 1).clamp(min=0), covariances, dims=1)
    between = torch.einsum("k,ka,kb->ab", n, means, means) - total * torch.outer(mean, mean)
    return mean, (within + between) / (total - 1)


def virtual(mean: Tensor, covariance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw from a Gaussian with a covariance that may be singular."""
    values, axes = torch.linalg.eigh(covariance)
    noise = torch.randn(count, len(mean), generator=generator, dtype=mean.dtype)
    drawn: Tensor = mean + noise * values.clamp(min=0).sqrt() @ axes.T
    return drawn
