"""The setting of all reference traces: networks as flat vectors, four clients, and plain SGD."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Vector = Tensor
Loss = Callable[[Vector, Tensor, Tensor], Tensor]
SIZES = (23, 12, 17, 8)
SAMPLED = ((0, 2), (1, 3), (1, 2), (0, 3), (2, 3))
FEATURES, HIDDEN, CLASSES = 4, 5, 3


@dataclass
class Problem:
    """Clients, network and training; `forward(tensors, x)` gives logits, `embed` the head's input."""

    start_tensors: dict[str, Tensor]
    forward: Callable[[dict[str, Tensor], Tensor], Tensor]
    embed: Callable[[dict[str, Tensor], Tensor], Tensor] | None = None
    lr: float = 0.1
    momentum: float = 0.9
    decay: float = 0.01
    epochs: int = 2
    batch: int = 5
    sizes: tuple[int, ...] = SIZES
    sampled: tuple[tuple[int, ...], ...] = SAMPLED
    clients: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(11)
        for size in self.sizes:
            truth = rng.normal(size=(FEATURES, CLASSES))
            x = rng.normal(size=(size, FEATURES)) + rng.normal(size=FEATURES)
            self.clients.append((torch.from_numpy(x), torch.from_numpy((x @ truth).argmax(1))))

    @property
    def names(self) -> list[str]:
        return list(self.start_tensors)

    @property
    def start(self) -> Vector:
        return torch.cat([tensor.flatten() for tensor in self.start_tensors.values()])

    @property
    def rounds(self) -> list[tuple[int, tuple[int, ...]]]:
        """Number and clients of every round."""
        return list(enumerate(self.sampled, 1))

    def tensors(self, w: Vector) -> dict[str, Tensor]:
        """The flat vector as named tensors, views of it."""
        parts = w.split([tensor.numel() for tensor in self.start_tensors.values()])
        return {
            name: part.view(self.start_tensors[name].shape)
            for name, part in zip(self.names, parts, strict=True)
        }

    def mask(self, *names: str) -> Vector:
        """1 where the vector belongs to one of the tensors, else 0."""
        parts = [torch.full_like(t, name in names).flatten() for name, t in self.start_tensors.items()]
        return torch.cat(parts)

    def loss(self, w: Vector, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.forward(self.tensors(w), x), y)

    def p(self, clients: Sequence[int]) -> Tensor:
        """n_i / n over some clients."""
        n = torch.tensor([self.sizes[i] for i in clients], dtype=torch.float64)
        return n / n.sum()

    def mean(self, values: Sequence[Tensor], clients: Sequence[int]) -> Tensor:
        """Mean of the clients' tensors by size."""
        return torch.tensordot(self.p(clients), torch.stack(list(values)), dims=1)

    def batches(self, client: int, round_: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in an order of its own; the last batch is shorter."""
        x, y = self.clients[client]
        order = torch.from_numpy(np.random.default_rng([client, round_, epoch]).permutation(len(y)))
        for part in order.split(self.batch):
            yield x[part], y[part]


def keep(w: Vector, g: Vector) -> Vector:
    """No correction."""
    return g


def sgd(
    problem: Problem,
    w: Vector,
    round_: int,
    client: int,
    *,
    loss: Loss | None = None,
    correct: Callable[[Vector, Vector], Vector] = keep,
    only: Vector | None = None,
    epochs: Sequence[int] | None = None,
    lr: float | None = None,
    running: Callable[[Vector, Tensor], Vector] = lambda w, x: w,
) -> Vector:
    """Local SGD as torch defines it: v <- momentum v + correct(g + decay w), w <- w - lr v; v starts at zero.

    `epochs` numbers the passes over the samples within the round, for algorithms of several phases; `running`
    changes what is not trained by a batch (BatchNorm statistics).
    """
    w, v = w.clone(), torch.zeros_like(w)
    for epoch in range(problem.epochs) if epochs is None else epochs:
        for x, y in problem.batches(client, round_, epoch):
            leaf = w.clone().requires_grad_()
            (g,) = torch.autograd.grad((loss or problem.loss)(leaf, x, y), leaf)
            g = correct(w, g + problem.decay * w)
            v = problem.momentum * v + (g if only is None else g * only)
            w = running(w, x) - (lr or problem.lr) * v
    return w


def steps(problem: Problem, client: int) -> int:
    """Local steps K of a round."""
    return problem.epochs * -(-problem.sizes[client] // problem.batch)


def gradient_weights(problem: Problem, client: int) -> float:
    """|a_i|_1: gradient j of K enters the model 1 + b + .. + b^(K-j) times (FedNova)."""
    K, b = steps(problem, client), problem.momentum
    return sum(b**s for j in range(K) for s in range(K - j))


def linear(**setting: object) -> Problem:
    """Softmax regression."""
    rng = np.random.default_rng(1)
    tensors = {"weight": rng.normal(size=(CLASSES, FEATURES)), "bias": rng.normal(size=CLASSES)}
    return Problem(
        {name: torch.from_numpy(value) for name, value in tensors.items()},
        lambda t, x: x @ t["weight"].T + t["bias"],
        **setting,
    )


def mlp(**setting: object) -> Problem:
    """A hidden layer whose tanh units are the features, and a head."""
    rng = np.random.default_rng(2)
    shapes = {
        "body.weight": (HIDDEN, FEATURES),
        "body.bias": (HIDDEN,),
        "top.weight": (CLASSES, HIDDEN),
        "top.bias": (CLASSES,),
    }

    def embed(t: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ t["body.weight"].T + t["body.bias"])

    return Problem(
        {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in shapes.items()},
        lambda t, x: embed(t, x) @ t["top.weight"].T + t["top.bias"],
        embed,
        **setting,
    )


def three_of_four(**setting: object) -> Problem:
    """Softmax regression with three clients in each round, for rules that look at pairs or axes."""
    return linear(sampled=((0, 1, 2), (1, 2, 3), (0, 2, 3), (0, 1, 3)), **setting)


def sampled_features(**setting: object) -> Problem:
    """The perceptron with what FedSR adds: a spread of the features and a reference for each class."""
    problem = mlp(**setting)
    problem.start_tensors |= {
        "spread.weight": torch.zeros(HIDDEN, HIDDEN).double(),
        "spread.bias": torch.zeros(HIDDEN).double(),
        "r_mu": torch.zeros(CLASSES, HIDDEN).double(),
        "r_sigma": torch.ones(CLASSES, HIDDEN).double(),
        "r_scale": torch.ones(()).double(),
    }
    return problem


def stack(**setting: object) -> Problem:
    """The perceptron with ReLU, as FedMA knows networks."""
    problem = mlp(**setting)

    def forward(t: dict[str, Tensor], x: Tensor) -> Tensor:
        hidden = torch.relu(x @ t["body.weight"].T + t["body.bias"])
        return hidden @ t["top.weight"].T + t["top.bias"]

    problem.forward = forward
    return problem


def batchnorm(**setting: object) -> Problem:
    """The perceptron with BatchNorm before its activation, in training mode; statistics are tensors."""
    problem = mlp(**setting)
    rng = np.random.default_rng(3)
    problem.start_tensors |= {
        "norm.weight": torch.from_numpy(rng.normal(size=HIDDEN)),
        "norm.bias": torch.from_numpy(rng.normal(size=HIDDEN)),
        "norm.running_mean": torch.zeros(HIDDEN).double(),
        "norm.running_var": torch.ones(HIDDEN).double(),
        "norm.num_batches_tracked": torch.zeros(()).double(),
    }

    def forward(t: dict[str, Tensor], x: Tensor) -> Tensor:
        z = x @ t["body.weight"].T + t["body.bias"]
        unit = (z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt()
        return torch.tanh(unit * t["norm.weight"] + t["norm.bias"]) @ t["top.weight"].T + t["top.bias"]

    problem.forward = forward
    return problem
