"""A client at work: the one SGD loop, evaluation, and the reply to the server."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedld.layout import FlatModel, Layout, Tree
from fedld.local.samples import Samples
from fedld.seeds import derive, torch_generator

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Loss of a batch given the model, the images and the labels."""

Correction = Callable[[Tensor, Tensor], None]
"""Changes the flat gradient in place, given (weights, gradient) of all trainable parameters."""


@dataclass(frozen=True)
class Training:
    """How every client trains: the same for every method of a comparison."""

    epochs: int = 1
    batch_size: int = 50
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    buffers: str = "global"
    bfloat16: bool = False
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None


@dataclass(frozen=True)
class Reply:
    """What a client gives back.

    `update` and `message` go to the server, `state` stays with the client, `metrics` are recorded.
    In `update` the shared parameters hold w_i - w; the shared buffers hold their new values.
    """

    update: Tensor
    message: Tree
    state: Tree
    metrics: dict[str, float]


@dataclass
class LocalClient:
    """One client in one round: its model (already the incoming one), samples, state, the server's message."""

    name: str
    round: int
    flat: FlatModel
    samples: Samples
    training: Training
    seed: int
    message: Tree = field(default_factory=dict)
    state: Tree = field(default_factory=dict)
    steps: int = 0
    travel: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0

    def __post_init__(self) -> None:
        self.incoming = self.flat.vector.clone()

    @property
    def model(self) -> nn.Module:
        """The network; its parameters are views of `weights`."""
        return self.flat.model

    @property
    def layout(self) -> Layout:
        """Where the parameters lie in `weights`."""
        return self.flat.layout

    @property
    def weights(self) -> Tensor:
        """All trainable parameters as one vector, the shared ones first."""
        return self.flat.weights

    def train(
        self,
        loss: Loss,
        *,
        correction: Correction | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        """SGD over the client's samples: the only training loop there is.

        `correction` edits the gradient before the step, `only` names the parameters that move.
        `travel` grows by lr times the sum of the weights with which the gradients entered the step, so that
        (w - w_i) / travel is their weighted mean: K lr for plain SGD, more with momentum.
        """
        setting, flat = self.training, self.flat
        rate, first = lr or setting.lr, self.steps
        optimiser = _SGD(flat, rate, setting, only)
        generator = torch_generator(self.seed, "augment", self.round, self.name, self.steps)
        training_mode(self.model, setting.buffers)
        total = torch.zeros((), device=flat.vector.device)
        # The global generator serves dropout and sampled features only, and is put back afterwards.
        with (
            _seeded(derive(self.seed, "noise", self.round, self.name, self.steps)),
            _trainable(self.model, only),
        ):
            for images, labels in self._epochs(setting.epochs if epochs is None else epochs):
                if setting.augment is not None:
                    images = setting.augment(images, generator)
                flat.gradient.zero_()
                with torch.autocast(images.device.type, torch.bfloat16, enabled=setting.bfloat16):
                    value = loss(self.model, images, labels)
                value.backward()  # type: ignore[no-untyped-call]
                if correction is not None:
                    correction(flat.weights, flat.gradient)
                optimiser.step()
                self.steps += 1
                self.loss_count += len(labels)
                total += value.detach() * len(labels)
        self.loss_sum += total.item()
        self.travel += rate * accumulation(self.steps - first, setting.momentum)

    def _epochs(self, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(epochs):
            order = torch_generator(self.seed, "order", self.round, self.name, self.steps)
            yield from self.samples.shuffled(self.training.batch_size, order)

    def reply(self, *, message: Tree | None = None, state: Tree | None = None) -> Reply:
        """Update of the shared part, the private part kept as state, and what is recorded."""
        layout, vector = self.layout, self.flat.vector
        update = vector - self.incoming
        update[layout.trainable :] = vector[layout.trainable :]
        kept = dict(state or {})
        if layout.size - layout.shared_end + layout.trainable - layout.shared:
            kept["private"] = layout.private_part(vector)
        metrics = {"steps": float(self.steps), "train_loss": self.loss_sum / max(self.loss_count, 1)}
        return Reply(update, message or {}, kept, metrics)


def accumulation(steps: int, momentum: float) -> float:
    """Sum of the weights of all gradients in K steps of SGD: |a_i|_1 of FedNova (Wang et al. 2020).

    Gradient j of K enters with weight 1 + b + .. + b^(K-j).

    >>> accumulation(3, 0.0), accumulation(3, 0.5)
    (3.0, 4.25)
    """
    return sum((1 - momentum**k) / (1 - momentum) for k in range(1, steps + 1))


def training_mode(model: nn.Module, buffers: str) -> None:
    """Train mode; with frozen buffers BatchNorm keeps using the statistics that came with the model."""
    model.train()
    if buffers == "frozen":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


class _SGD:
    """SGD on the flat vector: one fused kernel for the whole model, a fresh momentum each round.

    Through torch's function, since making a `torch.optim.SGD` imports the compiler: 1.5 s in every process.
    """

    def __init__(self, flat: FlatModel, lr: float, setting: Training, only: Collection[str] | None) -> None:
        named = [e for e in flat.layout.entries if only is not None and e.name in only]
        spans = [slice(None)] if only is None else [slice(e.start, e.start + e.size) for e in named]
        self.weights = [flat.weights[span].detach() for span in spans]
        self.gradients = [flat.gradient[span] for span in spans]
        self.momenta: list[Tensor | None] = [None] * len(spans)
        self.lr, self.setting = lr, setting

    def step(self) -> None:
        """v <- momentum v + g + weight_decay w;  w <- w - lr v."""
        sgd(
            self.weights,
            self.gradients,
            self.momenta,
            fused=True,
            weight_decay=self.setting.weight_decay,
            momentum=self.setting.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _trainable(model: nn.Module, only: Collection[str] | None) -> Iterator[None]:
    """Leave only the named parameters open to gradients."""
    frozen = [p for name, p in model.named_parameters() if only is not None and name not in only]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
