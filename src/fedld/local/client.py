"""A client at work: the one SGD loop, evaluation, and the reply to the server."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from fedld.layout import FlatModel, Layout, Tree
from fedld.local.context import Context
from fedld.local.embedding import Embedding
from fedld.local.samples import Batch, Samples
from fedld.seeds import derive, torch_generator

Loss = Callable[[Context], Tensor]
"""Loss of a batch in its context."""

MEASURED = ("steps", "train_loss", "lr")
"""What every client measures of its training; a method may add to it."""

Correction = Callable[[Tensor, Tensor], None]
"""Changes the flat gradient in place, given (weights, gradient) of all trainable parameters."""


@dataclass(frozen=True)
class Training:
    """How every client trains: the same for every method of a comparison.

    `steps`, where given, takes the place of `epochs`: so many batches, whatever the client's size.
    `factor` is what the schedule makes of every learning rate in this round.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float = 0.0
    buffers: str = "global"
    bfloat16: bool = False
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    steps: int | None = None
    factor: float = 1.0


@dataclass(frozen=True)
class Reply:
    """What a client gives back.

    `update` and `message` go to the server, `state` stays with the client, `metrics` are recorded.
    `update` has two kinds of numbers in one vector: its parameters hold the difference w_i - w, its buffers
    the new values, because a server combines differences of parameters but averages statistics as they are.
    """

    update: Tensor
    message: Tree
    state: Tree
    metrics: dict[str, float]


@dataclass
class LocalClient:
    """One client in one round: its model (already the incoming one), samples, state, the server's message.

    `lessons` are the samples that it trains on, where others sit the round out.
    """

    name: str
    round: int
    flat: FlatModel
    samples: Samples
    training: Training
    seed: int
    message: Tree = field(default_factory=dict)
    state: Tree = field(default_factory=dict)
    lessons: Samples | None = None
    steps: int = 0
    rate_sum: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    embedding: Embedding = field(default_factory=Embedding)

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
    def rate(self) -> float:
        """The learning rate in this round."""
        return self.training.lr * self.training.factor

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

        `correction` edits the gradient before the step, `only` names the parameters that move. Weight decay
        is a part of the loss: a correction sees the gradient of L_i(w) + (decay/2) |w|^2, so what it
        subtracts, scales or clips means the same with decay as without.
        `rate_sum` grows by lr times the sum of the weights with which the gradients entered the step, so that
        (w - w_i) / rate_sum is their weighted mean: K lr for plain SGD, more with momentum.
        """
        if only is not None and not only:
            return  # with a frozen trunk a method's own division may leave a part empty
        setting, flat = self.training, self.flat
        rate, first = (lr or setting.lr) * setting.factor, self.steps
        optimiser = _SGD(flat, rate, setting, only, corrected=correction is not None)
        generator = torch_generator(self.seed, "augment", self.round, self.name, self.steps)
        training_mode(self.model, setting.buffers)
        total = torch.zeros((), device=flat.vector.device)
        # The global generator serves dropout and sampled features only, and is put back afterwards.
        with (
            _seeded(derive(self.seed, "noise", self.round, self.name, self.steps)),
            _trainable(self.model, only),
        ):
            for images, labels in self._batches(epochs):
                if setting.augment is not None:
                    images = setting.augment(images, generator)
                decay = None if correction is None else optimiser.decay
                self._batch_gradient = partial(self._gradient, loss, images, labels, decay)
                value = self._batch_gradient()
                if correction is not None:
                    correction(flat.weights, flat.gradient)
                optimiser.step()
                self.steps += 1
                self.loss_count += len(labels)
                total += value * len(labels)
        self.loss_sum += total.item()
        self.rate_sum += rate * accumulation(self.steps - first, setting.momentum)

    def embedded(self) -> list[Batch]:
        """Features and labels of all samples in order, by the model as it is, in eval mode."""
        return self.embedding.batches(self.flat, self.samples)

    def context(self, images: Tensor, labels: Tensor) -> Context:
        """A batch with what this client knows."""
        return Context(self.flat, images, labels, self.samples.labels, self.incoming, self.round)

    def gradient_at(self, displacement: Tensor) -> None:
        """Within a correction: the gradient of the same batch at w + displacement takes its place."""
        here = self.weights.clone()
        self.weights.add_(displacement)
        self._batch_gradient()
        self.weights.copy_(here)

    def _gradient(
        self, loss: Loss, images: Tensor, labels: Tensor, decay: Callable[[], None] | None
    ) -> Tensor:
        """Loss of a batch at the weights as they are; its gradient is left in the flat model."""
        self.flat.gradient.zero_()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.training.bfloat16):
            value = loss(self.context(images, labels))
        value.backward()  # type: ignore[no-untyped-call]
        if decay is not None:
            decay()
        return value.detach()

    def _batches(self, epochs: int | None) -> Iterator[Batch]:
        """The batches of as many epochs as the caller wants, else of the set epochs or steps."""
        if epochs is None and self.training.steps is not None:
            return islice(self._epochs(count()), self.training.steps)
        return self._epochs(range(self.training.epochs if epochs is None else epochs))

    def _epochs(self, epochs: Iterable[int]) -> Iterator[Batch]:
        for _ in epochs:
            order = torch_generator(self.seed, "order", self.round, self.name, self.steps)
            yield from (self.lessons or self.samples).shuffled(self.training.batch_size, order)

    def reply(
        self, *, message: Tree | None = None, state: Tree | None = None, statistics: bool = True
    ) -> Reply:
        """Update of the shared part, the private part kept as state, and what is recorded.

        BatchNorm statistics that stay with the client go up as a copy, `statistics` of the message: a global
        model needs their mean.
        """
        layout, vector = self.layout, self.flat.vector
        update = layout.update(vector, self.incoming)
        sent, kept = dict(message or {}), dict(state or {})
        if statistics and len(layout.private_buffers(vector)):
            sent["statistics"] = layout.private_buffers(vector).clone()
        if layout.private_size:
            kept["private"] = layout.private_part(vector)
        metrics = {
            "steps": float(self.steps),
            "train_loss": self.loss_sum / max(self.loss_count, 1),
            "lr": self.rate,
        }
        return Reply(update, sent, kept, metrics)


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

    def __init__(
        self,
        flat: FlatModel,
        lr: float,
        setting: Training,
        only: Collection[str] | None,
        corrected: bool = False,
    ) -> None:
        named = [e for e in flat.layout.entries if only is not None and e.name in only]
        spans = [slice(None)] if only is None else [slice(e.start, e.start + e.size) for e in named]
        self.weights = [flat.weights[span].detach() for span in spans]
        self.gradients = [flat.gradient[span] for span in spans]
        self.momenta: list[Tensor | None] = [None] * len(spans)
        self.lr, self.setting = lr, setting
        self.weight_decay = 0.0 if corrected else setting.weight_decay

    def decay(self) -> None:
        """g <- g + weight_decay w, before a correction: `step` then adds none."""
        if self.setting.weight_decay:
            for weights, gradient in zip(self.weights, self.gradients, strict=True):
                gradient.add_(weights, alpha=self.setting.weight_decay)

    def step(self) -> None:
        """v <- momentum v + g + weight_decay w;  w <- w - lr v."""
        sgd(
            self.weights,
            self.gradients,
            self.momenta,
            fused=True,
            weight_decay=self.weight_decay,
            momentum=self.setting.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() writes down the stack, 4 ms a call
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
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
