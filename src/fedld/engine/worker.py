"""What a worker does: jobs in, results out. The same code runs in worker processes and in this one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, singledispatchmethod
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedld.aggregation import Vote
from fedld.aggregation.measured import LARGEST_LOSS
from fedld.analysis.sites import CaseResult, SiteResult, case_result, site_result
from fedld.data.client import Positions
from fedld.engine.client_data import Draws, StateStore
from fedld.engine.hardware import find_device
from fedld.engine.jobs import (
    CandidateJob,
    Incoming,
    Job,
    JobResult,
    LossJob,
    Personal,
    PersonalJob,
    Prepared,
    PrepareJob,
    Setup,
    SharedMemory,
    SiteTest,
    SiteTestJob,
    TestJob,
    Trained,
    TrainJob,
)
from fedld.engine.network import divided
from fedld.engine.summing import TRAINING, training_entry, weight_of
from fedld.layout import FlatModel, Tree
from fedld.local import FeatureSamples, LocalClient, RowSamples, Samples
from fedld.local.samples import BATCH
from fedld.methods.start import start_message
from fedld.models import Model, as_model
from fedld.models.centring import input_sums
from fedld.models.standardise import standardised
from fedld.records.schema import Which
from fedld.tasks import Tally
from fedld.tasks.classification import right
from fedld.transforms import BUFFERS, PARAMETERS, STATE, Sender

EVAL_BATCH = BATCH
T = TypeVar("T")


class Worker:
    """Runs jobs one after the other on one model."""

    def __init__(
        self, setup: Setup, memory: SharedMemory, draws: Draws | None = None, device: str | None = None
    ) -> None:
        self.setup, self.memory = setup, memory
        self.device = device or find_device(setup.experiment.device)
        self.draws = draws or Draws(setup, setup.experiment.seed)
        self.store = StateStore(setup.states)
        trunk, model = divided(setup.experiment, setup.method, setup.federation)
        self.flat = FlatModel(model, setup.layout, self.device)
        # Not from a table of open maps: whoever repairs a cache puts a new file in the old one's place.
        self.features = None if setup.features is None else np.load(setup.features, mmap_mode="r")
        if trunk is not None and self.features is None:
            assert isinstance(model, Model)
            model.behind(trunk.to(self.device))
        if setup.experiment.compile:
            self.flat.model.compile()
        self.common: Tree = {}
        self.kept: Tree = {}  # of the client that trains: what it kept for the transforms of its last update
        self.sent: Tree = {}  # the last update as it travels, where there are transforms
        self.output_shape = setup.federation.output_shape
        self._samples = lru_cache(maxsize=64)(self._make_samples)

    @singledispatchmethod
    def run(self, job: Job) -> JobResult:
        """Do one job."""
        raise TypeError(job)

    @run.register
    def _prepare(self, job: PrepareJob) -> Prepared:
        answers = {
            "method": self.setup.method.prepare,
            "features": self._feature_sums,
            "closed": start_message,
            "centres": self._centre_sums,
        }
        message = _on_cpu(answers[job.what](self._client(job)))
        return Prepared(message, all(bool(value.isfinite().all()) for value in message.values()))

    def _feature_sums(self, client: LocalClient) -> Tree:
        """Compute sums and sums of squares of what enters the head, over the client's training images."""
        layer = standardised(self.flat.model)
        assert layer is not None
        sums = torch.zeros(2, len(layer.shift), dtype=torch.float64, device=self.flat.vector.device)

        def add(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            features = inputs[0].double()
            sums.add_(torch.stack([features.sum(0), features.square().sum(0)]))

        handle = layer.register_forward_pre_hook(add)
        try:
            self.logits(client.samples)
        finally:
            handle.remove()
        return {"sums": sums, "count": torch.tensor(float(len(client.samples)), dtype=torch.float64)}

    def _centre_sums(self, client: LocalClient) -> Tree:
        """Sums of what enters the trained layers, over the client's training images."""
        sums = input_sums(self.flat.model, lambda: self.logits(client.samples))
        return {"sums": sums, "count": torch.tensor(float(len(client.samples)), dtype=torch.float64)}

    def _client(self, job: PrepareJob | TrainJob) -> LocalClient:
        """Give the client of a job, its incoming model loaded."""
        state, message = self._load(job.incoming)
        self.kept = _on_cpu({key: state.pop(key) for key in [*state] if key.startswith(STATE)})
        setup, name = self.setup, job.incoming.client
        samples, training_samples = self._samples(name), self.draws.training_images(name, job.round)
        return LocalClient(
            name=name,
            round=job.round,
            flat=self.flat,
            samples=samples,
            training=replace(setup.parts.training_in(job.round, name), private=setup.private.get(name)),
            seed=setup.experiment.seed,
            message=message,
            state=state,
            training_samples=None if len(training_samples) == len(samples) else self._at(training_samples),
        )

    @run.register
    def _train(self, job: TrainJob) -> Trained:
        setup, start = self.setup, time.perf_counter()
        measured, hidden = setup.experiment.client_losses, setup.transforms.sums_only is not None
        client = self._client(job)
        before = self._own_losses(client) if measured else None
        reply = self.setup.method.client_update(client)
        after = self._own_losses(client) if measured else None
        self.memory.updates[job.slot].copy_(reply.update)
        state = {**reply.state, **self._transform(job)}
        if state:
            self.store.save(job.incoming.client, job.round, state)
        message, metrics = _on_cpu(reply.message), reply.metrics
        if hidden:  # losses leave in the sum of the updates, and nothing else that was measured leaves
            if not setup.private:
                weight = weight_of(setup.method, setup.sizes[job.incoming.client])
                losses = training_entry(weight, metrics["train_loss"], (before, after))
                message = {**message, TRAINING: losses}
            metrics, before, after = {}, None, None
        return Trained(
            message=message,
            has_state=bool(state),
            metrics=metrics,
            before=before,
            after=after,
            finite=bool(torch.isfinite(reply.update).all()),
            seconds=time.perf_counter() - start,
        )

    def _transform(self, job: TrainJob) -> Tree:
        """Send the update in the row of a job through the run's transforms: the row is what arrives.

        The message itself is `sent`. Returns what the client keeps for the transforms.
        """
        chain, setup, row = self.setup.transforms, self.setup, self.memory.updates[job.slot]
        if not chain:
            return {}
        by_size = setup.method.client_weights == "size"
        sender = Sender(
            client=job.incoming.client,
            round=job.round,
            seed=setup.experiment.seed,
            layout=setup.layout,
            weight=setup.sizes[job.incoming.client] if by_size else 1.0,
            state=self.kept,
        )
        self.sent, kept = chain.encode(row, sender)
        arrived = chain.decode(self.sent, setup.layout)
        setup.layout.shared_parameters(row).copy_(arrived[PARAMETERS])
        setup.layout.shared_buffers(row).copy_(arrived[BUFFERS])
        return kept

    @run.register
    def _losses(self, job: LossJob) -> list[Tally]:
        if job.incoming is None or job.slot is None:
            self.flat.load(self.memory.weights)
        else:
            self._load(job.incoming)
            vector = self.flat.vector
            self.setup.layout.apply(vector, self.memory.updates[job.slot].to(vector.device))
        if job.validation:
            rows = (self.setup.federation.client(client).validation for client in job.clients)
            return [self.measure(self._at(positions)) for positions in rows]
        limit = self.setup.experiment.decompose_samples
        return [self.measure(self._samples(client, limit)) for client in job.clients]

    @run.register
    def _test(self, job: TestJob) -> None:
        self.flat.load(self.memory.weights)
        samples = self._at(self.setup.federation.test[job.start : job.stop])
        self.memory.logits[job.start : job.stop] = self.logits(samples)

    @run.register
    def _personal(self, job: PersonalJob) -> Personal:
        self._load_personal(job.incoming)
        samples = self._at(self.setup.federation.test)
        return self._measured(job, self.logits(samples), samples.labels)

    @torch.inference_mode()
    def personal(self, jobs: Sequence[PersonalJob]) -> list[Personal]:
        """Give models with one body (`Setup.one_body`): the features are computed once for all of them."""
        layout, vector, model = self.setup.layout, self.flat.vector, as_model(self.flat.model)
        heads = []
        for job in jobs:
            self._load(job.incoming)
            heads.append(layout.private_part(vector))
        samples = self._at(self.setup.federation.test)
        logits = torch.empty(len(jobs), len(samples), len(self.setup.federation.classes))
        model.eval()
        for start in range(0, len(samples), EVAL_BATCH):
            features = model.embed(samples.batch(slice(start, start + EVAL_BATCH))[0])
            for out, head in zip(logits, heads, strict=True):
                layout.set_private(vector, head)
                out[start : start + EVAL_BATCH] = model.head(features).float()
        return [self._measured(job, out, samples.labels) for job, out in zip(jobs, logits, strict=True)]

    def _measured(self, job: PersonalJob, logits: Tensor, labels: Tensor) -> Personal:
        """Give what a client's model is worth on the global test set and on the client's own part of it."""
        test, local = self.setup.federation.test, self.setup.federation.client(job.incoming.client).test
        task, here = self.setup.task, torch.from_numpy(np.isin(test, local))
        return Personal(
            task.tally(logits, labels) if len(test) else None,
            self.tally(logits[here], labels[here]) if len(local) else None,
        )

    @run.register
    def _site_test(self, job: SiteTestJob) -> SiteTest:
        client = job.incoming.client
        if not len(self.setup.federation.client(client).test):
            return SiteTest({})
        if self.setup.task.dense:
            return SiteTest({}, self._by_model(job.incoming, self._cases_at_site))
        if self.setup.task.name != "classification":
            return SiteTest({})  # intervals are for shares of right answers and for means over cases
        return SiteTest(self._by_model(job.incoming, self._at_site))

    def _by_model(self, incoming: Incoming, measure: Callable[[str], T]) -> dict[Which, T]:
        """Measure the global model and the client's own one, as far as there are any."""
        measured: dict[Which, T] = {}
        if self.setup.method.has_global:
            self.flat.load(self.memory.weights)
            measured["global"] = measure(incoming.client)
        if self.setup.personalised:
            self._load_personal(incoming)
            measured["personal"] = measure(incoming.client)
        return measured

    def _cases_at_site(self, client: str) -> CaseResult:
        """Average the measures of single cases of the model in the network over a client's own test set."""
        f, task = self.setup.federation, self.setup.task
        rows = self.tested(f.client(client).test)
        values = task.case_values(self.logits(self._at(rows)), np.array(f.labels[rows]), f.classes)
        bounds = {name: 1.0 for name in values if not name.startswith("hausdorff")}
        return case_result(values, bounds, None if f.patients is None else f.patients[rows])

    def tested(self, rows: Positions) -> Positions:
        """Give the test images of a client of which its result may tell: here all."""
        return rows

    def _at_site(self, client: str) -> SiteResult:
        """Measure the model in the network on a client's own test set; the last class is the positive one."""
        f = self.setup.federation
        rows = self.tested(f.client(client).test)
        logits, labels = self.logits(self._at(rows)), np.array(f.labels[rows])
        patients, last = f.patients, len(f.classes) - 1
        return site_result(
            torch.softmax(logits.double(), 1).numpy(),
            right(logits, torch.from_numpy(labels)).numpy(),
            labels=labels,
            positive=last,
            specificity=self.setup.experiment.specificity,
            groups=None if patients is None else patients[rows],
        )

    def _load_personal(self, incoming: Incoming) -> None:
        """Put the model that a client predicts with into the network."""
        state, _ = self._load(incoming)
        if "personal" in state:
            self.flat.load(state["personal"])

    @run.register
    def _candidates(self, job: CandidateJob) -> Vote:
        """Compute the losses of the candidates, all on the same images: the *differences* decide."""
        self._load(job.incoming)
        layout, vector = self.setup.layout, self.flat.vector
        samples = self._at(self.draws.candidates(job.incoming.client, job.round, job.samples))
        start = layout.shared_parameters(vector).clone()
        basis = self.memory.basis.to(vector.device)
        layout.shared_buffers(vector).copy_(layout.shared_buffers(basis[-1]))
        losses = []
        for row in job.coefficients:
            step = torch.tensor(row, device=vector.device) @ layout.shared_parameters(basis[:-1])
            layout.shared_parameters(vector).copy_(start + step)
            losses.append(self.losses(samples).nan_to_num(nan=LARGEST_LOSS).clamp(max=LARGEST_LOSS))
        table = torch.stack(losses)
        squares = (table - table[0]).square().mean(1)
        return Vote(len(samples), tuple(table.mean(1).tolist()), tuple(squares.tolist()))

    def _load(self, incoming: Incoming) -> tuple[Tree, Tree]:
        """Put the client's incoming model into the network; give its state and message.

        Later wins: the global weights (or `weights` of the client's own message, which replace them all);
        the private part that the client kept in its state; `private` of its own message, by which a server
        sets a client's private parameters (FedPAC's heads) but never its private buffers.
        """
        state = self.store.load(incoming.client, incoming.state_round)
        message = {**self.common, **incoming.message}
        self.flat.load(message.pop("weights", self.memory.weights))
        layout, vector = self.setup.layout, self.flat.vector
        if "private" in state:
            layout.set_private(vector, state.pop("private").to(vector.device))
        if "private" in message:
            layout.private_parameters(vector).copy_(message.pop("private"))
        state = {key: value.to(vector.device) for key, value in state.items()}
        return state, {key: value.to(vector.device) for key, value in message.items()}

    @torch.inference_mode()
    def measure(self, samples: Samples) -> Tally:
        """Compute the tally of the model's outputs in eval mode."""
        return self.tally(self.logits(samples), samples.labels)

    def tally(self, logits: Tensor, labels: Tensor) -> Tally:
        """Compute the tally of outputs; a site leaves out the samples of which it tells nothing."""
        return self.setup.task.tally(logits, labels)

    @torch.inference_mode()
    def _own_losses(self, client: LocalClient) -> Tally:
        """Measure the client's model on its own samples.

        By the same pass as features that its method reads.
        """
        if not (self.setup.method.reads_features and self.setup.divisible):
            return self.measure(client.samples)
        head = as_model(self.flat.model).head
        logits = torch.cat([head(features).float().cpu() for features, _ in client.embedded()])
        return self.tally(logits, client.samples.labels)

    def losses(self, samples: Samples) -> Tensor:
        """Compute the plain loss of every sample, in eval mode."""
        return self.setup.task.losses(self.logits(samples), samples.labels)

    @torch.inference_mode()
    def logits(self, samples: Samples) -> Tensor:
        """Compute the logits of all samples, in eval mode."""
        self.flat.model.eval()
        out = torch.empty(len(samples), *self.output_shape)
        for start in range(0, len(samples), EVAL_BATCH):
            images, _ = samples.batch(slice(start, start + EVAL_BATCH))
            with self.setup.parts.training.autocast(images.device.type):
                out[start : start + EVAL_BATCH] = self.flat.model(images).float()
        return out

    def _make_samples(self, client: str, limit: int | None = None) -> Samples:
        """Give a client's training samples, or a fixed random part of at most `limit` of them."""
        positions = self.setup.federation.client(client).train
        if limit is not None:
            positions = self.draws.part(client, positions, limit, "decompose")
        return self._at(positions)

    def _at(self, positions: NDArray[np.int64]) -> Samples:
        f = self.setup.federation
        if self.features is not None:
            return FeatureSamples(self.features, f.labels, positions, self.device)
        if f.images.ndim == 2 and len(f.mean) == f.images.shape[1]:  # a table of numbers
            return RowSamples(
                f.images, f.labels, positions=positions, mean=f.mean, std=f.std, device=self.device
            )
        if f.images.dtype != np.uint8:  # a user's own floats, as they are
            return FeatureSamples(f.images, f.labels, positions, self.device)
        return Samples(f.images, f.labels, positions=positions, mean=f.mean, std=f.std, device=self.device)


def _on_cpu(message: Tree) -> Tree:
    return {key: value.cpu() for key, value in message.items()}
