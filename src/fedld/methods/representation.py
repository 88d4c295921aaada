"""Methods with a term on the features: MOON (contrast with earlier models) and FedSR (simple features)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.local import Context, LocalClient, Reply
from fedld.methods.base import Card, Method
from fedld.models import as_model


@dataclass(frozen=True)
class Moon(Method):
    """Model-contrastive learning: features like the incoming model's, unlike those of the client's last one.

    L_i + mu * mean of -log(e^(s/tau) / (e^(s/tau) + e^(s'/tau))), where s and s' are the cosines of a
    sample's features with those of the incoming model and of the client's own model of its last round. A
    client's first round has no last model and trains as FedAvg.
    """

    mu: float = 1.0
    tau: float = 0.5

    card: ClassVar[Card] = Card("MOON", "Li et al. 2021", personal="its last model, for training only")
    sums_suffice: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)

    def client_update(self, client: LocalClient) -> Reply:
        """Train on the contrastive loss; the trained model is kept for the next time."""
        last = client.state.get("last")

        def contrastive(context: Context) -> Tensor:
            if last is None:
                return self.objective.loss(context)
            z, others = context.features, (context.teacher, context.seen_by(last))
            cosines = [F.cosine_similarity(z, other.features) for other in others]
            positive = torch.zeros_like(context.labels)
            contrast = F.cross_entropy(torch.stack(cosines, 1) / self.tau, positive)
            return self.objective.loss(context) + self.mu * contrast

        client.train(contrastive)
        return client.reply(state={"last": client.flat.vector.clone()})


@dataclass(frozen=True)
class FedSR(Method):
    """A simple representation: CE on z ~ N(mu(x), sigma(x)) + l2r |z| + cmi KL(z | r_y).

    mu(x) are the network's features; sigma(x) = softplus of one linear layer added on top of them. The
    reference r_y = N(r_mu, r_sigma) of every class and the scale of z in the KL term are trained and kept by
    each client. They serve in training only: predictions are head(mu(x)), so the model is a global one.
    """

    l2r: float = 0.01
    cmi: float = 5e-4

    card: ClassVar[Card] = Card(
        "FedSR",
        "Nguyen et al. 2022",
        personal="class references",
        communication="a layer each way",
    )

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)

    def adapt(self, model: nn.Module) -> nn.Module:
        """Add a layer for sigma(x) and the class references to the network."""
        head = as_model(model).head
        classes, features = head.weight.shape
        with torch.device("meta"):  # without storage, so that no generator is moved
            spread = nn.Linear(features, features, dtype=head.weight.dtype)
        spread.to_empty(device=head.weight.device)
        for parameter in spread.parameters():
            nn.init.zeros_(parameter)
        model.add_module("spread", spread)
        model.register_parameter("r_mu", nn.Parameter(head.weight.new_zeros(classes, features)))
        model.register_parameter("r_sigma", nn.Parameter(head.weight.new_ones(classes, features)))
        model.register_parameter("r_scale", nn.Parameter(head.weight.new_ones(())))
        return model

    def private(self, model: nn.Module) -> frozenset[str]:
        """Name the class references and their scale."""
        return frozenset({"r_mu", "r_sigma", "r_scale"})

    def loss(self, context: Context) -> Tensor:
        """Compute the objective on a sampled representation, and its two regularisers."""
        model, mu = as_model(context.model), context.features
        sigma = F.softplus(model.get_submodule("spread")(mu)).to(mu.dtype)
        z = mu + sigma * torch.randn_like(mu)
        scale, r_mu, r_sigma = (model.get_parameter(name) for name in ("r_scale", "r_mu", "r_sigma"))
        kl = divergence(mu * scale, sigma * scale, r_mu[context.labels], F.softplus(r_sigma)[context.labels])
        length: Tensor = torch.linalg.vector_norm(z, dim=1).mean()
        value = self.objective.loss(context.with_logits(model.head(z)))
        return value + self.l2r * length + self.cmi * kl


def divergence(mu: Tensor, sigma: Tensor, r_mu: Tensor, r_sigma: Tensor) -> Tensor:
    """Compute KL(N(mu, sigma) | N(r_mu, r_sigma)), diagonal deviations, mean over the samples."""
    quadratic = (sigma.square() + (mu - r_mu).square()) / (2 * r_sigma.square())
    return (r_sigma.log() - sigma.log() + quadratic - 0.5).sum(1).mean()
