"""A federation small enough to check by hand: full-batch models in float64, driven without the engine."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from fedld.layout import FlatModel, Layout
from fedld.local import LocalClient, Training
from fedld.methods import Messages, Replies


class FullBatch:
    """All samples in one batch."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def shuffled(self, size, generator):
        yield self.images, self.labels

    def in_order(self, size):
        yield self.images, self.labels


@dataclass
class Federation:
    """Clients with their states; `round(i, j, ..)` runs one round with those clients."""

    method: object
    model: nn.Module
    data: list
    training: list
    sizes: tuple
    states: dict = field(default_factory=dict)
    rounds: int = 0

    def __post_init__(self):
        self.method.check(self.model)
        self.model = self.method.adapt(self.model)
        self.layout = Layout.of(self.model, self.method.private(self.model))
        self.flat = FlatModel(self.model, self.layout)
        self.server = self.method.init(self.flat.vector.clone(), self.layout, self.sizes)
        self.replies = None

    def load(self, i):
        """As the engine's worker loads a client: global or own weights, then what is private."""
        message = {**self.method.broadcast(self.server), **self.method.personal(self.server, i)}
        self.flat.load(message.pop("weights", self.server.weights))
        state = dict(self.states.get(i, {}))
        if "private" in state:
            self.layout.set_private(self.flat.vector, state.pop("private"))
        if "private" in message:
            self.layout.private_parameters(self.flat.vector).copy_(message.pop("private"))
        return message, state

    def client(self, i):
        message, state = self.load(i)
        return LocalClient(
            name=f"c{i}",
            round=self.rounds,
            flat=self.flat,
            samples=self.data[i],
            training=self.training[i],
            seed=0,
            message=message,
            state=state,
        )

    def round(self, *clients):
        clients = clients or tuple(range(len(self.data)))
        self.rounds += 1
        senders = {
            "clients": tuple(f"c{i}" for i in clients),
            "rows": list(clients),
            "sizes": tuple(self.sizes[i] for i in clients),
            "client_weights": self.method.client_weights,
        }
        if self.method.prepares:
            self.prepared = [self.method.prepare(self.client(i)) for i in clients]
            self.server = self.method.gather(self.server, Messages(**senders, messages=self.prepared))
        found = []
        for i in clients:
            found.append(self.method.client_update(self.client(i)))
            if found[-1].state:
                self.states[i] = found[-1].state
        self.replies = Replies(
            **senders,
            messages=[reply.message for reply in found],
            layout=self.layout,
            updates=torch.stack([reply.update for reply in found]),
            steps=tuple(reply.metrics["steps"] for reply in found),
        )
        self.server, self.combined = self.method.server_update(self.server, self.replies)
        return self.server.weights[: self.layout.trainable].clone()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models of a dozen numbers gain nothing from a second thread, and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def oracle():
    """Arrays of one oracle file by key."""
    from pathlib import Path

    folder = Path(__file__).parents[1] / "oracles"
    return lambda name: np.load(folder / f"{name}.npz", allow_pickle=False)


@pytest.fixture
def softmax_regression(oracle):
    """The three clients of local_traces.npz under a method; steps per round and sizes may differ."""
    traces = oracle("local_traces")

    def make(method, steps=(4, 4, 4), sizes=(1, 1, 1), **setting):
        model = nn.Linear(4, 3).double()
        w0 = torch.from_numpy(traces["w0"])
        with torch.no_grad():
            model.weight.copy_(w0[:12].view(3, 4))
            model.bias.copy_(w0[12:])
        base = replace(Training(epochs=1, batch_size=50, lr=float(traces["lr"]), momentum=0.0), **setting)
        pairs = zip(traces["X"], traces["Y"], strict=True)
        data = [FullBatch(torch.from_numpy(x), torch.from_numpy(y)) for x, y in pairs]
        return Federation(
            method=method,
            model=model,
            data=data,
            training=[replace(base, epochs=k) for k in steps],
            sizes=sizes,
        )

    return make


@pytest.fixture
def images():
    """Random images of two classes for some clients, under a method and a model."""

    def make(method, model, clients=3, samples=12, size=8, dtype=torch.float64, **setting):
        generator = torch.Generator().manual_seed(3)
        data = []
        for _ in range(clients):
            labels = torch.arange(samples) % 2
            pixels = torch.randn(samples, 3, size, size, generator=generator, dtype=dtype)
            data.append(FullBatch(pixels + labels.to(dtype)[:, None, None, None] * 0.5, labels))
        training = [replace(Training(epochs=1, batch_size=50, lr=0.05, momentum=0.0), **setting)] * clients
        return Federation(
            method=method, model=model.to(dtype), data=data, training=training, sizes=(samples,) * clients
        )

    return make


@pytest.fixture(scope="session")
def dealt():
    """Features and labels dealt among clients, under a method and a head; `parts` are their positions."""

    def make(method, head, features, labels, parts):
        data = [FullBatch(features[part], labels[part]) for part in parts]
        sizes = tuple(len(part) for part in parts)
        return Federation(
            method=method,
            model=head,
            data=data,
            training=[Training(epochs=1, batch_size=50, lr=0.01, momentum=0.0)] * len(parts),
            sizes=sizes,
        )

    return make
