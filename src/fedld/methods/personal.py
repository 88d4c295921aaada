"""Methods that train a model for every client: Ditto, FedRoD and pFedLA."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedld.aggregation import Aggregate
from fedld.layout import Layout, Tree
from fedld.local import Context, LocalClient, Objective, Reply
from fedld.local.objectives import LogitAdjusted
from fedld.methods.base import Card, Method, Replies, Server
from fedld.models import as_model
from fedld.seeds import torch_generator


@dataclass(frozen=True)
class Ditto(Method):
    """A global model and one for each client (Algorithm 1 of the paper).

    The global model is FedAvg's. Every client also keeps v_i, which it trains on its own samples towards it:
    L_i(v) + (lam/2) |v - w_t|^2, from where it was left the last time, with as many epochs again.
    """

    lam: float = 1.0

    card: ClassVar[Card] = Card("Ditto", "Li et al. 2021", personal="whole model")
    sums_suffice: ClassVar[bool] = True
    personalised: ClassVar[bool] = True

    def client_update(self, client: LocalClient) -> Reply:
        """Train as FedAvg, then the client's own model, which predicts and stays here."""
        incoming = client.weights.clone()

        def proximal(weights: Tensor, gradient: Tensor) -> None:
            gradient.add_(weights - incoming, alpha=self.lam)

        reply = super().client_update(client)
        trained = client.flat.vector.clone()
        client.flat.load(client.state.get("personal", client.incoming))
        client.train(self.loss, correction=proximal)
        state = {**reply.state, **client.moments, "personal": client.flat.vector.clone()}
        client.flat.load(trained)
        return replace(reply, state=state)


PERSONAL = "personal"


@dataclass(frozen=True)
class FedRoD(Method):
    """Two predictors on one body: a shared generic head, and a personal head that each client adds.

    Body and generic head minimise the balanced softmax of their logits g, and are averaged. The personal head
    h_i, which starts at zero and stays with the client, minimises CE(g + h_i) with body and g held fixed. The
    global model predicts by g, a client by g + h_i.
    """

    objective: Objective = field(default_factory=LogitAdjusted)

    card: ClassVar[Card] = Card("FedRoD", "Chen and Chao 2022", personal="a second head")
    personalised: ClassVar[bool] = True

    def check(self, model: nn.Module) -> None:
        """Check that the network has features and a head."""
        as_model(model)

    def adapt(self, model: nn.Module) -> nn.Module:
        """Add a personal head, zero at first, to the output of the network's head."""
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
        """Name the personal head."""
        return frozenset(f"{PERSONAL}.{name}" for name, _ in model.get_submodule(PERSONAL).named_parameters())

    def loss(self, context: Context) -> Tensor:
        """Add the objective of the generic logits and, for the personal head, CE of both heads together."""
        features, head = context.features, as_model(context.model).head
        generic = F.linear(features, head.weight, head.bias)
        personal_logits = context.model.get_submodule(PERSONAL)(features.detach())
        both = context.with_logits(generic.detach() + personal_logits)
        value = self.objective.loss(context.with_logits(generic))
        return value + F.cross_entropy(both.logits, context.labels)


@dataclass(frozen=True)
class PFedLA(Method):
    """Layer-wise personalised aggregation: client i starts from sum_j alpha_i[l, j] theta_j in every layer l.

    alpha_i comes from a hypernetwork of the client's own on the server, softmax(w2 relu(w1 v_i)), which
    begins as the plain mean. After training from theta to theta' it descends J'(theta - theta'), J being the
    Jacobian of the mixture; the client's model becomes theta'. A client that never replied has no model to
    mix. There is no global model, and the aggregation rule is reported but not used.
    """

    hn_lr: float = 5e-3
    embedding: int = 32
    hidden: int = 32

    card: ClassVar[Card] = Card(
        "pFedLA",
        "Ma et al. 2022",
        personal="whole model",
        communication="none, server keeps models",
    )
    personalised: ClassVar[bool] = True
    has_global: ClassVar[bool] = False
    starts_from_global: ClassVar[bool] = False

    def init(self, weights: Tensor, layout: Layout, sizes: Sequence[int]) -> Server:
        """Store a hypernetwork for every client, and no models yet."""
        names = [entry.name.rpartition(".")[0] for entry in layout.entries]
        layers, clients = list(dict.fromkeys(names)), len(sizes)
        generator = torch_generator(0, "pfedla")
        scale = self.embedding**-0.5
        extra = {
            "models": weights.repeat(clients, 1),
            "seen": torch.zeros(clients),
            "layer": torch.tensor([layers.index(name) for name in names]),
            "length": torch.tensor([entry.size for entry in layout.entries]),
            "v": torch.randn(clients, self.embedding, generator=generator).to(weights),
            "w1": scale * torch.randn(clients, self.hidden, self.embedding, generator=generator).to(weights),
            "w2": weights.new_zeros(clients, len(layers), clients, self.hidden),
        }
        return Server(weights, extra)

    def personal(self, server: Server, row: int) -> Tree:
        """Send the client's mixture, once there are models to mix."""
        return {"weights": layer_mixture(server.extra, row)} if server.extra["seen"].any() else {}

    def server_update(self, server: Server, replies: Replies) -> tuple[Server, Aggregate]:
        """Step each client's hypernetwork, and replace its model by the one it trained."""
        old, cut = server.extra, replies.layout.trainable
        new = {key: value.clone() for key, value in old.items()}
        for row, update in zip(replies.rows, replies.updates, strict=True):
            start = self.personal(server, row).get("weights", server.weights)
            trained = update.clone()
            trained[:cut] += start[:cut]
            if old["seen"].any():
                for key, value in self._descend(old, row, (start - trained)[:cut]).items():
                    new[key][row] = value
            new["models"][row], new["seen"][row] = trained, 1.0
        weights = new["models"][new["seen"].bool()].mean(0)
        return replace(server, weights=weights, extra=new), self.aggregate(replies)

    def _descend(self, extra: Tree, row: int, change: Tensor) -> Tree:
        """Step on <mixture, theta - theta'>, with the hypernetwork's gradient J'(theta - theta')."""
        hypernetwork = {key: extra[key][row].clone().requires_grad_() for key in ("v", "w1", "w2")}
        products = torch.zeros_like(
            hypernetwork["w2"][:, :, 0]
        )  # [l, j]: <theta_j, theta - theta'> within layer l
        for layer, span in spans(extra):
            if span.stop <= len(change):
                products[layer] += (extra["models"][:, span] @ change[span]).to(products.dtype)
        inner = (alpha(hypernetwork, extra["seen"]) * products).sum()
        slopes = torch.autograd.grad(inner, list(hypernetwork.values()))
        return {
            key: (hypernetwork[key] - self.hn_lr * slope).detach()
            for key, slope in zip(hypernetwork, slopes, strict=True)
        }


def alpha(hypernetwork: Tree, seen: Tensor) -> Tensor:
    """Compute (layers, clients) mixing weights: each row sums to one over the clients that have a model."""
    features = torch.relu(hypernetwork["w1"] @ hypernetwork["v"])
    return (hypernetwork["w2"] @ features).masked_fill(seen == 0, -torch.inf).softmax(1)


def layer_mixture(extra: Tree, row: int) -> Tensor:
    """Mix the client's incoming model, layer by layer."""
    weights = alpha({key: extra[key][row] for key in ("v", "w1", "w2")}, extra["seen"])
    mixed = torch.empty_like(extra["models"][0])
    for layer, span in spans(extra):
        mixed[span] = weights[layer].to(mixed.dtype) @ extra["models"][:, span]
    return mixed


def spans(extra: Tree) -> list[tuple[int, slice]]:
    """List layer and place of every tensor of the model."""
    ends = extra["length"].cumsum(0).tolist()
    return [
        (layer, slice(end - length, end))
        for layer, length, end in zip(extra["layer"].tolist(), extra["length"].tolist(), ends, strict=True)
    ]
