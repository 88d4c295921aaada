from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedld.local import LocalClient, Reply
from fedld.methods.base import Card, Method


@dataclass(frozen=True)
class Ditto(Method):
    """A model for everybody and one for each client (Algorithm 1 of the paper).

    The global model is FedAvg's. Every client also keeps v_i, which it trains on its own samples towards it:
    L_i(v) + (lam/2) |v - w_t|^2, from where it was left the last time, with as many epochs again.
    """

    lam: float = 1.0

    card: ClassVar[Card] = Card("Ditto", "Li et al. 2021", personal="whole model")
    sums_suffice: ClassVar[bool] = True
    personalised: ClassVar[bool] = True

    def client_update(self, client: LocalClient) -> Reply:
        """FedAvg's update, then the client's own model, which predicts and stays here."""
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
