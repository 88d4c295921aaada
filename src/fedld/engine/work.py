"""What a worker does: jobs in, results out. The same code runs in worker processes and in this one."""

import time
from dataclasses import dataclass, field
from functools import lru_cache, singledispatchmethod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.analysis.metrics import evaluate_logits
from fedld.data import Federation
from fedld.engine.experiment import Experiment
from fedld.engine.states import StateStore
from fedld.layout import FlatModel, Layout, Tree
from fedld.local import LocalClient, Samples
from fedld.methods import Method
from fedld.models import batchnorm_names, build, load_weights
from fedld.seeds import numpy_generator

EVAL_BATCH = 256


@dataclass(frozen=True)
class Arena:
    """Memory that all workers share: the global weights, one row a client's update, the test logits."""

    weights: Tensor
    updates: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Setup:
    """All that a worker needs to know of a run."""

    experiment: Experiment
    method: Method
    federation: Federation
    layout: Layout
    states: Path

    @property
    def sizes(self) -> list[int]:
        """Training samples of every client."""
        return [len(client.train) for client in self.federation.clients]


@dataclass(frozen=True)
class Incoming:
    """Which model a client starts from: its state as of a round (0: none yet) and a message of its own."""

    client: int
    state_round: int = 0
    message: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class TrainJob:
    """Train one client; the update goes to row `slot` of the arena."""

    round: int
    slot: int
    incoming: Incoming


@dataclass(frozen=True)
class LossJob:
    """Measure one model on the training samples of some clients: row entries L_j(w_i) of Eq. 2.

    The model is client i's before aggregation (`slot` and `incoming` given) or the global one.
    """

    clients: tuple[int, ...]
    slot: int | None = None
    incoming: Incoming | None = None


@dataclass(frozen=True)
class TestJob:
    """Logits of the global model for a part of the test set."""

    start: int
    stop: int


@dataclass(frozen=True)
class PersonalJob:
    """Measure the model that a client holds on the global test set and on the client's own."""

    incoming: Incoming


Job = TrainJob | LossJob | TestJob | PersonalJob


@dataclass(frozen=True)
class Sums:
    """Sums over samples, so that means of any union are right."""

    loss: float
    loss_squared: float
    correct: int
    count: int

    @property
    def mean(self) -> float:
        """Mean loss."""
        return self.loss / self.count if self.count else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of samples classified rightly."""
        return self.correct / self.count if self.count else float("nan")

    @property
    def standard_error(self) -> float:
        """Standard error of the mean loss, when the samples are a random part of the client's."""
        if self.count < 2:
            return float("nan")
        variance = (self.loss_squared - self.loss**2 / self.count) / (self.count - 1)
        return float((max(variance, 0.0) / self.count) ** 0.5)


@dataclass(frozen=True)
class Trained:
    """Result of a `TrainJob`; the update itself lies in the arena, the client's state (if `kept`) on disk."""

    message: Tree
    kept: bool
    metrics: dict[str, float]
    before: Sums | None
    after: Sums | None
    finite: bool
    seconds: float


@dataclass(frozen=True)
class Personal:
    """Result of a `PersonalJob`."""

    metrics: dict[str, float | None]
    own_accuracy: float | None


Result = Trained | list[Sums] | Personal | None


def initial_model(experiment: Experiment, method: Method, federation: Federation) -> nn.Module:
    """The network at round 0: the same for every method of a seed, or the weights of a file."""
    _, height, width, channels = federation.images.shape
    model = build(
        experiment.model,
        classes=len(federation.classes),
        channels=channels,
        image_size=min(height, width),
        seed=experiment.seed,
    )
    if experiment.weights is not None:
        load_weights(model, experiment.weights)
    method.check(model)
    return method.adapt(model)


def make_layout(experiment: Experiment, method: Method, model: nn.Module) -> Layout:
    """What is shared and what stays with a client."""
    private = set(method.private(model))
    if experiment.buffers == "local":
        private |= batchnorm_names(model) - {name for name, _ in model.named_parameters()}
    return Layout.of(model, private)


class Worker:
    """Runs jobs one after the other on one model."""

    def __init__(self, setup: Setup, arena: Arena) -> None:
        self.setup, self.arena = setup, arena
        self.training = setup.experiment.training()
        self.store = StateStore(setup.states)
        self.flat = FlatModel(
            initial_model(setup.experiment, setup.method, setup.federation),
            setup.layout,
            setup.experiment.device,
        )
        if setup.experiment.compile:
            self.flat.model.compile()
        self.common: Tree = {}
        self._samples = lru_cache(maxsize=64)(self._make_samples)

    @singledispatchmethod
    def run(self, job: Job) -> Result:
        """Do one job."""
        raise TypeError(job)

    @run.register
    def _train(self, job: TrainJob) -> Trained:
        start = time.perf_counter()
        state, message = self._load(job.incoming)
        federation, experiment = self.setup.federation, self.setup.experiment
        samples = self._samples(job.incoming.client)
        before = self.measure(samples) if experiment.client_losses else None
        client = LocalClient(
            federation.clients[job.incoming.client].name,
            job.round,
            self.flat,
            samples,
            self.training,
            experiment.seed,
            message,
            state,
        )
        reply = self.setup.method.client_update(client)
        after = self.measure(samples) if experiment.client_losses else None
        self.arena.updates[job.slot].copy_(reply.update)
        if reply.state:
            self.store.save(job.incoming.client, job.round, reply.state)
        finite = bool(torch.isfinite(reply.update).all())
        message = {key: value.cpu() for key, value in reply.message.items()}
        return Trained(
            message, bool(reply.state), reply.metrics, before, after, finite, time.perf_counter() - start
        )

    @run.register
    def _losses(self, job: LossJob) -> list[Sums]:
        if job.incoming is None or job.slot is None:
            self.flat.load(self.arena.weights)
        else:
            self._load(job.incoming)
            layout, update = self.setup.layout, self.arena.updates[job.slot].to(self.flat.vector.device)
            self.flat.vector[: layout.shared] += update[: layout.shared]
            self.flat.vector[layout.buffers] = update[layout.buffers]
        limit = self.setup.experiment.decompose_samples
        return [self.measure(self._samples(client, limit)) for client in job.clients]

    @run.register
    def _test(self, job: TestJob) -> None:
        self.flat.load(self.arena.weights)
        samples = self._test_samples(self.setup.federation.test[job.start : job.stop])
        self.arena.logits[job.start : job.stop] = self.logits(samples)

    @run.register
    def _personal(self, job: PersonalJob) -> Personal:
        self._load(job.incoming)
        test, own = self.setup.federation.test, self.setup.federation.clients[job.incoming.client].test
        samples = self._test_samples(test)
        logits = self.logits(samples)
        right = (logits.argmax(1) == samples.labels).numpy()
        accuracy = float(right[np.isin(test, own)].mean()) if len(own) else None
        return Personal(evaluate_logits(logits, samples.labels), accuracy)

    def _load(self, incoming: Incoming) -> tuple[Tree, Tree]:
        """Put the client's incoming model into the network; give its state and message."""
        state = self.store.load(incoming.client, incoming.state_round)
        message = {**self.common, **incoming.message}
        self.flat.load(message.pop("weights", self.arena.weights))
        layout, vector = self.setup.layout, self.flat.vector
        if "private" in state:
            layout.set_private(vector, state.pop("private").to(vector.device))
        if "private" in message:
            vector[layout.shared : layout.trainable] = message.pop("private").to(vector.device)
        state = {key: value.to(vector.device) for key, value in state.items()}
        return state, {key: value.to(vector.device) for key, value in message.items()}

    @torch.inference_mode()
    def measure(self, samples: Samples) -> Sums:
        """Plain cross-entropy and hits in eval mode."""
        logits = self.logits(samples)
        losses = F.cross_entropy(logits, samples.labels, reduction="none").double()
        correct = int((logits.argmax(1) == samples.labels).sum())
        return Sums(losses.sum().item(), losses.square().sum().item(), correct, len(samples))

    @torch.inference_mode()
    def logits(self, samples: Samples) -> Tensor:
        """Logits of all samples, in eval mode."""
        self.flat.model.eval()
        out = torch.empty(len(samples), len(self.setup.federation.classes))
        for start in range(0, len(samples), EVAL_BATCH):
            images, _ = samples.batch(slice(start, start + EVAL_BATCH))
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.training.bfloat16):
                out[start : start + EVAL_BATCH] = self.flat.model(images).float()
        return out

    def _make_samples(self, client: int, limit: int | None = None) -> Samples:
        """A client's training samples, or a fixed random part of at most `limit` of them."""
        positions = self.setup.federation.clients[client].train
        if limit is not None and limit < len(positions):
            generator = numpy_generator(self.setup.experiment.seed, "decompose", client)
            positions = np.sort(generator.choice(positions, limit, replace=False))
        return self._test_samples(positions)

    def _test_samples(self, positions: NDArray[np.int64]) -> Samples:
        f = self.setup.federation
        return Samples(f.images, f.labels, positions, f.mean, f.std, self.setup.experiment.device)
