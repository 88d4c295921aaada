"""Jobs and their results, the memory they share, and what every backend does with them.

Jobs and results are also what a server and its sites send each other, so their fields say what they may hold:
pydantic checks it there, and only there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedld.aggregation import Vote
from fedld.analysis.sites import CaseResult, SiteResult
from fedld.config.experiment import Experiment
from fedld.config.resolve import make_metrics, make_schedule, make_task, make_training, make_transforms
from fedld.data import Federation
from fedld.layout import Layout, Tree, tree_bytes
from fedld.local import Training
from fedld.local.optimiser import Schedule
from fedld.local.private import PrivateSteps
from fedld.methods import Method
from fedld.records.schema import Reason, Which
from fedld.tasks import Measure, Tally, Task
from fedld.tasks.base import further_measures
from fedld.transforms import Chain


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """Memory that all workers share: the global weights, one row per client's update, the test logits.

    `basis` holds what candidate steps are made of: one row per direction, the last one for their buffers.
    """

    weights: Tensor
    updates: Tensor
    logits: Tensor
    basis: Tensor
    file: Path | None = None  # where the tensors lie, if not in the machine's shared memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let another process map the same file; torch itself would copy the tensors to shared memory."""
        if self.file is None:
            return super().__reduce_ex__(protocol)
        parts = (self.weights, self.updates, self.logits, self.basis)
        return map_file, (self.file, tuple(tuple(part.shape) for part in parts))

    def release(self) -> None:
        """Delete the file, if there is one."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


Shapes = tuple[tuple[int, ...], ...]


def map_file(file: Path, shapes: Shapes) -> SharedMemory:
    """Give tensors of these shapes, one after the other in a file."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(sum(sizes),)))
    parts = (part.view(shape) for part, shape in zip(torch.split(whole, sizes), shapes, strict=True))
    weights, updates, logits, basis = parts
    return SharedMemory(weights=weights, updates=updates, logits=logits, basis=basis, file=file)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Values that names of the experiment stand for, resolved once per run."""

    task: Task
    metrics: dict[str, Measure]
    training: Training
    schedule: Schedule
    transforms: Chain
    client_lr: dict[str, float]

    @classmethod
    def of(cls, experiment: Experiment) -> "Parts":
        """Resolve the names of an experiment."""
        metrics = further_measures(make_metrics(experiment))
        return cls(
            task=make_task(experiment),
            metrics=metrics,
            training=make_training(experiment),
            schedule=make_schedule(experiment),
            transforms=make_transforms(experiment),
            client_lr=experiment.client_lr,
        )

    def training_in(self, round_: int, client: str) -> Training:
        """Say how a client trains in a round."""
        lr = self.client_lr.get(client, self.training.lr)
        return replace(self.training, lr=lr, factor=self.schedule.factor(round_))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a worker needs to know of a run; of a frozen trunk the digest and the cache of its outputs."""

    experiment: Experiment
    method: Method
    federation: Federation
    layout: Layout
    states: Path
    trunk: str = ""
    features: Path | None = None
    private: Mapping[str, PrivateSteps] = field(default_factory=dict)  # by client, where steps are noisy
    one_body: bool = False  # clients' models differ only in what comes after the features
    parts: "Parts" = field(kw_only=True)

    @cached_property
    def personalised(self) -> bool:
        """Whether clients predict with models of their own: by their method, or by their own statistics."""
        return self.method.personalised or self.layout.size > self.layout.shared_end

    @property
    def divisible(self) -> bool:
        """Whether features and head give the network's bits when they are computed apart."""
        return not self.experiment.compile and self.experiment.dtype == "float32"

    @cached_property
    def transforms(self) -> Chain:
        """What happens to updates on their way to the server."""
        return self.parts.transforms

    @cached_property
    def update_form(self) -> Tree:
        """A message of the form that every client's update has on its way."""
        return self.transforms.template(self.layout)

    @cached_property
    def update_bytes(self) -> int:
        """Bytes of a client's update on its way."""
        return tree_bytes(self.update_form)

    @cached_property
    def task(self) -> Task:
        """What is learned."""
        return self.parts.task

    @cached_property
    def metrics(self) -> dict[str, Measure]:
        """The user's measures beside those of the task, by name."""
        return self.parts.metrics

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Training samples of every client, by name."""
        return {client.name: client.size for client in self.federation.clients}

    @cached_property
    def rows(self) -> dict[str, int]:
        """Every client's row in matrices over all clients."""
        return {name: row for row, name in enumerate(self.sizes)}

    @cached_property
    def label_counts(self) -> dict[str, list[int]]:
        """Every client's training samples by class."""
        return dict(zip(self.sizes, self.federation.label_counts().tolist(), strict=True))

    @cached_property
    def test_labels(self) -> Tensor:
        """Labels of the global test set."""
        return torch.from_numpy(np.array(self.federation.labels[self.federation.test]))

    @cached_property
    def client_tests(self) -> dict[str, NDArray[np.int64]]:
        """Where in the global test set each client's own test images lie, of those who have any."""
        federation = self.federation
        place = np.full(len(federation.labels), -1)  # of every image in the test set
        place[federation.test] = np.arange(len(federation.test))
        rows = {client.name: place[client.test] for client in federation.clients if len(client.test)}
        return {name: at[at >= 0] for name, at in rows.items()}


Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, lt=1e9)]
TrainingMetrics = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")], float], Field(max_length=32)
]


@dataclass(frozen=True)
class Incoming:
    """Which model a client starts from: its state as of a round (0: none yet) and a message of its own."""

    client: str
    state_round: Count = 0
    message: Tree = field(default_factory=dict)


@dataclass(frozen=True)
class PrepareJob:
    """Ask a client for what its method needs before the round's training (`Method.prepare`).

    Before the first round every client may be asked for something else: sums of its `features`, where a head
    standardises its inputs; of the inputs of trained layers, whose means are the `centres` of centred steps;
    and for a `closed` start what `fedld.methods.start` needs.
    """

    round: Count
    incoming: Incoming
    what: Literal["method", "features", "centres", "closed"] = "method"
    kind: Literal["prepare"] = "prepare"


@dataclass(frozen=True)
class TrainJob:
    """Train one client; the update goes to row `slot` of the memory."""

    round: Count
    slot: Count
    incoming: Incoming
    kind: Literal["train"] = "train"


@dataclass(frozen=True, kw_only=True)
class LossJob:
    """Measure one model on the training samples of some clients: row entries L_j(w_i) of Eq. 2.

    The model is client i's before aggregation (`slot` and `incoming` given) or the global one. With
    `validation` the samples are those that the clients have set aside.
    """

    clients: tuple[str, ...]
    slot: Count | None = None
    incoming: Incoming | None = None
    validation: bool = False
    kind: Literal["loss"] = "loss"


@dataclass(frozen=True)
class TestJob:
    """Logits of the global model for a part of the test set."""

    start: int
    stop: int


@dataclass(frozen=True)
class PersonalJob:
    """Measure the model that a client holds on the global test set and on the client's own."""

    incoming: Incoming
    kind: Literal["personal"] = "personal"


@dataclass(frozen=True)
class SiteTestJob:
    """Measure the final models, the global one and the client's own, on the client's own test set."""

    incoming: Incoming
    kind: Literal["site-test"] = "site-test"


@dataclass(frozen=True, kw_only=True)
class CandidateJob:
    """Measure candidate server steps on some of a client's training samples, drawn anew in every round."""

    round: Count
    incoming: Incoming
    coefficients: Annotated[tuple[tuple[float, ...], ...], Field(max_length=256)]
    samples: Count
    kind: Literal["candidates"] = "candidates"


ClientJob = PrepareJob | TrainJob | LossJob | PersonalJob | SiteTestJob | CandidateJob
"""What is done where a client's images are."""
Job = ClientJob | TestJob
RoundJob = PrepareJob | TrainJob | CandidateJob
"""A client's part in a round; without it the round may go on."""


@dataclass(frozen=True)
class Prepared:
    """Result of a `PrepareJob`."""

    message: Tree
    finite: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a `TrainJob`; the update lies in the shared memory, a new state on disk."""

    message: Tree
    has_state: bool
    metrics: TrainingMetrics
    before: Tally | None
    after: Tally | None
    finite: bool
    seconds: Seconds


@dataclass(frozen=True)
class Personal:
    """Result of a `PersonalJob`: the tally of the global test set, and of the client's own."""

    test: Tally | None
    own: Tally | None


@dataclass(frozen=True)
class SiteTest:
    """Result of a `SiteTestJob`: by model, "global" and "personal", as far as there are any.

    Classification has shares of right answers (`models`); a task with measures of single cases has means over
    them (`cases`).
    """

    models: dict[Which, SiteResult]
    cases: dict[Which, CaseResult] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldVote:
    """Result of a `CandidateJob` that stays at the client until it is summed."""

    kind: Literal["held"] = "held"


ClientResult = Prepared | Trained | Tally | Personal | SiteTest | Vote | HeldVote
"""Result of a `ClientJob` for one client."""
JobResult = Prepared | Trained | list[Tally] | Personal | SiteTest | Vote | HeldVote | None


@dataclass(frozen=True)
class Failure:
    """A job that raised: the last line of its traceback, the whole of it, and the kind of failure."""

    error: str
    detail: str
    reason: Reason = "failed"


Done = Callable[[Job, JobResult | Failure], None]
