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
        """It needs features and a head."""
        as_model(model)

    def client_update(self, client: LocalClient) -> Reply:
        """SGD on the contrastive loss; the trained model is kept for the next time."""
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
