from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.local import Context, Objective
from fedld.local.objectives import LogitAdjusted
from fedld.methods.base import Card, Method
from fedld.models import as_model

PERSONAL = "personal"


@dataclass(frozen=True)
class FedRoD(Method):
    """Two predictors on one body: a generic head for everybody, a personal head added to it by each client.

    Body and generic head minimise the balanced softmax of their logits g, and are averaged. The personal head
    h_i, which starts at zero and stays with the client, minimises CE(g + h_i) with body and g held fixed. The
    global model predicts by g, a client by g + h_i.
    """

    objective: Objective = field(default_factory=LogitAdjusted)

    card: ClassVar[Card] = Card("FedRoD", "Chen and Chao 2022", personal="a second head")
    personalised: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """It needs features and a head."""
        as_model(model)

    def adapt(self, model: nn.Module) -> nn.Module:
        """The network whose head's output is followed by the personal head's, zero at first."""
        head = as_model(model).head
        with torch.device("meta"):  # without storage, so that no generator is moved
            personal = nn.Linear(head.in_features, head.out_features, dtype=head.weight.dtype)
        personal.to_empty(device=head.weight.device)
        for parameter in personal.parameters():
            nn.init.zeros_(parameter)
        model.add_module(PERSONAL, personal)
        head.register_forward_hook(lambda _, inputs, generic: generic + personal(inputs[0]))
        return model

    def private(self, model: nn.Module) -> frozenset[str]:
        """The personal head."""
        return frozenset(f"{PERSONAL}.{name}" for name, _ in model.get_submodule(PERSONAL).named_parameters())

    def loss(self, context: Context) -> Tensor:
        """The objective of the generic logits, and CE of both heads together for the personal one."""
        features, head = context.features, as_model(context.model).head
        generic = F.linear(features, head.weight, head.bias)
        personal_logits = context.model.get_submodule(PERSONAL)(features.detach())
        both = context.with_logits(generic.detach() + personal_logits)
        value = self.objective.loss(context.with_logits(generic))
        return value + F.cross_entropy(both.logits, context.labels)
