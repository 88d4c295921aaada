"""A client at work: the one training loop, evaluation, and the reply to the server."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count, islice
from typing import Literal

import torch
from torch import Tensor, nn

from fedld.errors import FedLDError
from fedld.layout import FlatModel, Layout, Tree
from fedld.local.base import Context
from fedld.local.noise import KeyedRandom, key_of_seed
from fedld.local.optimiser import Optimiser, OptimiserSettings, parameter_groups
from fedld.local.private import PrivateSteps
from fedld.local.samples import Batch, ClassWeights, Embedding, Samples
from fedld.models.base import as_model, head_block_names
from fedld.models.centring import CentredSteps
from fedld.seeds import derive, torch_generator

Loss = Callable[[Context], Tensor]
"""Loss of a batch in its context."""

MEASURED = ("steps", "train_loss", "lr")
"""What every client measures of its training; a method may add to it."""

Correction = Callable[[Tensor, Tensor], None]
"""Changes the flat gradient in place, given (weights, gradient) of all trainable parameters."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How every client trains: the same for every method of a comparison.

    `steps`, where given, takes the place of `epochs`: so many batches, whatever the client's size.
    `factor` is what the schedule makes of every learning rate in this round. `lr` is the client's own where
    clients have different ones. `private` steps are noisy ones that hide single samples.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float = 0.0
    buffers: str = "global"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    steps: int | None = None
    factor: float = 1.0
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    private: PrivateSteps | None = None
    class_weights: ClassWeights | None = None

    def autocast(self, device: str) -> torch.autocast:
        """Give the context in which networks compute: mixed precision where it is asked for."""
        kind = torch.float16 if self.dtype == "float16" else torch.bfloat16
        return torch.autocast(device, kind, enabled=self.dtype != "float32")

    def accumulation(self, steps: int) -> float:
        """Sum of the weights with which the gradients of so many steps enter; one for every step of Adam."""
        if self.optimiser.adaptive:
            return float(steps)
        return accumulation(steps, self.momentum, nesterov=self.optimiser.kind == "nesterov")


@dataclass(frozen=True)
class Reply:
    """What a client returns from a round.

    Attributes:
        update: one vector: for parameters the difference w_i - w, for buffers the new values, because a
            server combines differences of parameters but averages statistics as they are.
        message: tensors for the server, by name.
        state: tensors that stay with the client until its next round.
        metrics: numbers for the client's record.
    """

    update: Tensor
    message: Tree
    state: Tree
    metrics: dict[str, float]


@dataclass(kw_only=True)
class LocalClient:
    """One client in one round, as `Method.client_update` sees it.

    Attributes:
        name: the client's name.
        round: number of the round.
        flat: the model as one vector; it holds the incoming weights at first.
        model: the network; its parameters are views of `weights`.
        layout: where the parameters lie in `weights`.
        incoming: the vector of the incoming model.
        samples: all training samples.
        training: learning rate, batch size, epochs and the like.
        seed: the run's seed.
        message: what the server sent beside the weights.
        state: what the client kept of its last round.
        training_samples: samples used in this round; the others are held out for measuring.
        most_steps: bound on all training of the round.
        smallest_class: nothing is sent by itself about a class with fewer samples.
        private_key: secret key of the noise and batches of private steps; None for one of the run's seed.
        scale: factor of the loss in float16.
    """

    name: str
    round: int
    flat: FlatModel
    samples: Samples
    training: Training
    seed: int
    message: Tree = field(default_factory=dict)
    state: Tree = field(default_factory=dict)
    training_samples: Samples | None = None
    steps: int = 0
    rate_sum: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    embedding: Embedding = field(default_factory=Embedding)
    mean_gradient: Tensor | None = None
    moments: Tree = field(default_factory=dict)
    calls: int = 0
    most_steps: int | None = None
    smallest_class: int = 1
    private_key: bytes | None = None
    scale: float = 2.0**16

    def __post_init__(self) -> None:
        self.incoming = self.flat.vector.clone()
        self.model: nn.Module = self.flat.model
        self.layout: Layout = self.flat.layout

    @cached_property
    def _centred(self) -> CentredSteps | None:
        """What centred steps are at the incoming weights, if steps are centred."""
        if not self.training.optimiser.centred:
            return None
        return CentredSteps(self.model, self.layout, self.incoming)

    def step_along(self, gradient: Tensor) -> None:
        """Take one step without momentum.

        Args:
            gradient: a vector as long as `weights`; centred steps change it in place.
        """
        if self._centred is not None:
            self._centred.apply(gradient)
        self.weights.sub_(gradient, alpha=self.rate)

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
        average: bool = False,
    ) -> None:
        """Train the model: the one training loop of the package.

        Weight decay is part of the loss: a correction sees the gradient of L_i(w) + (decay/2) |w|^2.

        `rate_sum` grows by lr times the sum of the weights with which the gradients entered the steps, so
        that (w - w_i) / rate_sum is their weighted mean: K lr for plain SGD, more with momentum. A step of
        Adam is no sum of gradients and counts as one.

        Args:
            loss: the loss of a batch in its context.
            correction: edits the flat gradient in place before each step, given (weights, gradient).
            epochs: passes over the samples; default: the experiment's epochs or steps.
            lr: learning rate; default: the experiment's.
            only: names of the parameters that move; default: all.
            average: also set `mean_gradient`, the mean of the corrected gradients of all steps: from the
                distance of the weights, or as a sum where the optimiser is not linear.

        Raises:
            FedLDError: the steps exceed `most_steps`.
        """
        if only is not None and not only:
            return  # with a frozen trunk a method's own division may leave a part empty
        if self.most_steps is not None:
            self._check_steps(epochs, self.most_steps)
        setting, flat = self.training, self.flat
        rate, first = (lr or setting.lr) * setting.factor, self.steps
        optimiser = self._optimiser(rate, only, lr is None, corrected=correction is not None)
        start = flat.weights.clone() if average else None
        total_gradient = torch.zeros_like(flat.weights) if average and not setting.optimiser.linear else None
        generator = torch_generator(self.seed, "augment", self.round, self.name, self.steps)
        training_mode(self.model, setting.buffers)
        total = torch.zeros((), device=flat.vector.device)
        # The global generator serves dropout and sampled features only, and is put back afterwards.
        with (
            _seeded(derive(self.seed, "noise", self.round, self.name, self.steps)),
            _trainable(self.model, only),
        ):
            for images, labels in self._batches(epochs):
                if setting.augment is not None and len(labels):
                    images = setting.augment(images, generator)
                decay = None if correction is None else optimiser.decay
                self._batch_gradient = partial(self._gradient, loss, images, labels, decay)
                value = self._batch_gradient()
                if correction is not None:
                    correction(flat.weights, flat.gradient)
                if total_gradient is not None:
                    total_gradient.add_(flat.gradient)
                if self._centred is not None:
                    self._centred.apply(flat.gradient)
                optimiser.step()
                self.steps += 1
                self.loss_count += len(labels)
                total += value * len(labels)
        self.loss_sum += total.item()
        steps = self.steps - first
        self.rate_sum += rate * setting.accumulation(steps)
        if setting.optimiser.keeps_moments:
            self.moments |= {f"moments{self.calls}.{k}": value for k, value in optimiser.moments().items()}
        self.calls += 1
        if start is not None:
            self.mean_gradient = (
                (start - flat.weights) / self.rate_sum if total_gradient is None else total_gradient / steps
            )

    def _optimiser(
        self, rate: float, only: Collection[str] | None, own_rates: bool, *, corrected: bool
    ) -> Optimiser:
        """Give the optimiser of one call; a rate that a method sets itself is that of the head too."""
        setting, special = self.training, {}
        if own_rates and (head_lr := setting.optimiser.head_lr) is not None:
            special = dict.fromkeys(head_block_names(as_model(self.model)), head_lr * setting.factor)
        prefix = f"moments{self.calls}."
        kept = {key.removeprefix(prefix): v for key, v in self.state.items() if key.startswith(prefix)}
        return Optimiser(
            self.flat,
            parameter_groups(self.layout, rate, only, special),
            setting.optimiser,
            momentum=setting.momentum,
            weight_decay=setting.weight_decay,
            corrected=corrected,
            moments=kept if setting.optimiser.keeps_moments else None,
        )

    def _check_steps(self, epochs: int | None, most_steps: int) -> None:
        """Refuse training beyond `most_steps`, before it begins."""
        planned = self.training.steps if epochs is None else None
        if planned is None:
            samples = len(self.training_samples or self.samples)
            planned = (epochs or self.training.epochs) * -(-samples // self.training.batch_size)
        if self.steps + planned > most_steps:
            raise FedLDError(
                f"it trains for at most {most_steps} steps in a round, not {self.steps + planned}"
            )

    def disclosed(self, counts: Tensor) -> Tensor:
        """Set the counts of small classes to 0, so that they can be sent.

        Args:
            counts: (C,) samples by class.

        Returns:
            The counts with 0 for every class of fewer than `smallest_class` samples.
        """
        return torch.where(counts < self.smallest_class, torch.zeros_like(counts), counts)

    def embedded(self) -> list[Batch]:
        """Compute features and labels of all samples in order, by the model as it is, in eval mode.

        Returns:
            Batches of (features, labels).
        """
        return self.embedding.batches(self.flat, self.samples)

    def context(self, images: Tensor, labels: Tensor) -> Context:
        """Put a batch together with what this client knows.

        Args:
            images: the batch's samples.
            labels: their labels.

        Returns:
            The context.
        """
        context = Context(
            flat=self.flat,
            images=images,
            labels=labels,
            client_labels=self.samples.labels,
            incoming=self.incoming,
            round=self.round,
        )
        weights = self.training.class_weights
        if weights is None or weights.applied != "loss":
            return context
        by_class = weights.of(self.samples.labels, smallest=self.smallest_class)
        return replace(context, class_weights=by_class.to(images.device))

    def gradient_at(self, displacement: Tensor) -> None:
        """Replace the gradient by that of the same batch at w + displacement; for use within a correction.

        Args:
            displacement: a vector as long as `weights`.
        """
        here = self.weights.clone()
        self.weights.add_(displacement)
        self._batch_gradient()
        self.weights.copy_(here)

    def _gradient(
        self, loss: Loss, images: Tensor, labels: Tensor, decay: Callable[[], None] | None
    ) -> Tensor:
        """Compute the loss of a batch at the weights as they are; its gradient is left in the flat model."""
        if (private := self.training.private) is not None:
            return self._private_gradient(private, loss, (images, labels), decay)
        value = self._scaled_gradient(loss, images, labels)
        if (clip := self.training.optimiser.clip) is not None:
            length = torch.linalg.vector_norm(self.flat.gradient)
            self.flat.gradient.mul_((clip / (length + 1e-6)).clamp(max=1.0))
        if decay is not None:
            decay()
        return value.detach()

    def _scaled_gradient(self, loss: Loss, images: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch; its gradient is left in the flat model.

        In float16 small gradients would become zero, so the loss is scaled. Where the scaled gradient
        overflows, the batch is passed again with half the scale.
        """
        while True:
            self.flat.gradient.zero_()
            with self.training.autocast(images.device.type):
                value = loss(self.context(images, labels))
            if self.training.dtype != "float16":
                value.backward()  # type: ignore[no-untyped-call]
                return value
            (value * self.scale).backward()  # type: ignore[no-untyped-call]
            if self.scale <= 1 or bool(self.flat.gradient.isfinite().all()):
                self.flat.gradient.div_(self.scale)
                return value
            self.scale /= 2

    def _private_gradient(
        self, private: PrivateSteps, loss: Loss, batch: Batch, decay: Callable[[], None] | None
    ) -> Tensor:
        """Compute the noisy gradient of a batch, left in the flat model; its loss is not a number."""
        random = self._private_random("noise", self.steps)

        def of_sample(logits: Tensor, images: Tensor, labels: Tensor) -> Tensor:
            return loss(self.context(images, labels).with_logits(logits))

        private.gradient(self.flat, of_sample, batch=batch, samples=len(self.samples), random=random)
        if decay is not None:
            decay()
        return torch.tensor(torch.nan)

    def _private_random(self, purpose: str, *step: int) -> KeyedRandom:
        """Make the random numbers of noise or batches: under a secret key, or one of the run's seed."""
        key = key_of_seed(self.seed) if self.private_key is None else self.private_key
        return KeyedRandom(key, purpose, self.round, self.name, *step)

    def _batches(self, epochs: int | None) -> Iterator[Batch]:
        """Give the batches of as many epochs as the caller wants, else of the set epochs or steps."""
        if (private := self.training.private) is not None:
            return private.batches(self.samples, self._private_random("batches"))
        if epochs is None and self.training.steps is not None:
            return islice(self._epochs(count()), self.training.steps)
        return self._epochs(range(self.training.epochs if epochs is None else epochs))

    def _epochs(self, epochs: Iterable[int]) -> Iterator[Batch]:
        for _ in epochs:
            order = torch_generator(self.seed, "order", self.round, self.name, self.steps)
            samples, weights = self.training_samples or self.samples, self.training.class_weights
            if weights is not None and weights.applied == "sampling":
                by_class = weights.of(samples.labels, smallest=self.smallest_class)
                yield from samples.drawn(self.training.batch_size, by_class[samples.labels], order)
            else:
                yield from samples.shuffled(self.training.batch_size, order)

    def reply(
        self, *, message: Tree | None = None, state: Tree | None = None, statistics: bool = True
    ) -> Reply:
        """Make the reply: the update of the shared part, the private part as state, and the recorded numbers.

        Args:
            message: tensors for the server.
            state: tensors that stay with the client.
            statistics: send a copy of BatchNorm statistics that stay with the client, because a global model
                needs their mean.

        Returns:
            The reply.
        """
        layout, vector = self.layout, self.flat.vector
        update = layout.update(vector, self.incoming)
        sent, kept = dict(message or {}), {**(state or {}), **self.moments}
        if statistics and layout.size > layout.shared_end:
            sent["statistics"] = layout.private_buffers(vector).clone()
        if layout.private_size:
            kept["private"] = layout.private_part(vector)
        metrics = {
            "steps": float(self.steps),
            "train_loss": self.loss_sum / max(self.loss_count, 1),
            "lr": self.rate,
        }
        return Reply(update, sent, kept, metrics)


def accumulation(steps: int, momentum: float, *, nesterov: bool = False) -> float:
    """Sum of the weights of all gradients in K steps of SGD: |a_i|_1 of FedNova (Wang et al. 2020).

    Gradient j of K enters with weight 1 + b + .. + b^(K-j); Nesterov's momentum adds b^(K-j+1).

    >>> accumulation(3, 0.0), accumulation(3, 0.5), accumulation(1, 0.5, nesterov=True)
    (3.0, 4.25, 1.5)
    """
    return sum((1 - momentum ** (k + nesterov)) / (1 - momentum) for k in range(1, steps + 1))


def training_mode(model: nn.Module, buffers: str) -> None:
    """Train mode; with frozen buffers BatchNorm keeps using the statistics that came with the model."""
    model.train()
    if buffers == "frozen":
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed() writes down the stack, 4 ms a call
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        if torch.backends.mps.is_available():
            torch.mps.manual_seed(seed)
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
