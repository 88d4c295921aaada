"""What a site measures for one run: a budget, and ties to what the run announced.

A server that may have any model measured any number of times learns about single images, however many images
each sum is over. So the settings of a run are fixed by its first order, its global models are as many as its
rounds, candidate steps and other sites' models are measured only where the settings say so, and each model is
counted once. The file `measured.json` in the run's folder at the site has the digests and the count. It is
written before anything is measured.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedld.aggregation import Measured
from fedld.config.experiment import Experiment
from fedld.engine.backends.flower.limits import Limits
from fedld.engine.backends.flower.wire import Order
from fedld.engine.jobs import CandidateJob, ClientJob, LossJob, SiteTestJob, TrainJob
from fedld.errors import FedLDError
from fedld.layout import Tree
from fedld.methods import Method
from fedld.records.writer import write_atomically

FILE = "measured.json"
DAY = 86400.0
SPARE = 16
"""Further global models of a run: those before the first round, and of rounds that a resumed run repeats."""
JOBS_PER_ROUND = 16
"""Different jobs with one global model, other sites' models not counted: a round has at most seven."""
BASES = 2
"""Sets of candidate steps at one global model and training: a resumed run may repeat a round."""
SITE_TESTS = 3
"""Models that are tested on the site's test images in one run: the final one, again after an extension."""


@dataclass
class Asked:
    """What a run has asked of this site so far; digests stand for models."""

    begun: float
    settings: str
    models: dict[str, list[str]] = field(default_factory=dict)
    measurements: int = 0
    site_tests: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class RunBudget:
    """The bounds of one run at one site."""

    folder: Path
    experiment: Experiment
    method: Method
    limits: Limits

    def spend(self, order: Order, trees: Mapping[str, Tree]) -> None:
        """Enter an order; refuse one that is not of the run as it was announced, or exceeds its budget.

        Args:
            order: what the server asks.
            trees: the tensors of the message, by name.

        Raises:
            FedLDError: the order asks for something else, or for more, than the run's settings allow.
        """
        for job in order.jobs:
            self._check_job(job, trees)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(self.folder):
            asked = self._read(order)
            self._enter(asked, order, trees)
            write_atomically(self.folder / FILE, json.dumps(vars(asked)).encode())

    def _check_job(self, job: ClientJob, trees: Mapping[str, Tree]) -> None:
        """A job must follow from the run's settings."""
        if isinstance(job, CandidateJob):
            self._check_candidates(job, trees.get("candidates", {}))
        if isinstance(job, LossJob) and job.slot is not None and not self.experiment.decompose:
            raise FedLDError("it measures other sites' models only where a run decomposes the loss")
        if isinstance(job, LossJob) and job.validation and self.experiment.validation is None:
            raise FedLDError("this run sets no validation images aside")

    def _check_candidates(self, job: CandidateJob, tree: Tree) -> None:
        rule = self.method.rule
        if not isinstance(rule, Measured):
            raise FedLDError("it measures candidate steps only under the rule 'measured'")
        basis = tree.get("directions", torch.zeros(0))
        announced = rule.propose(basis).coefficients if len(basis) == len(rule.bases()) else ()
        count, asked = len(rule.pairs()), set(job.coefficients)
        known = len(asked) == len(job.coefficients) and asked <= set(announced)
        if job.samples != rule.samples or not known:
            raise FedLDError(
                f"it measures the run's {count} candidate steps on {rule.samples} images, nothing else"
            )

    def _read(self, order: Order) -> Asked:
        """What was asked before; a new run is refused where too many were begun within a day."""
        file, settings = self.folder / FILE, self._settings(order)
        if not file.exists():
            self._check_runs()
            return Asked(time.time(), settings)
        try:
            asked = Asked(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            raise FedLDError("its account of this run's measurements is damaged, so nothing leaves") from None
        if asked.settings != settings:
            raise FedLDError("the run's settings are not those that it began with at this site")
        return asked

    def _check_runs(self) -> None:
        begun = 0
        for file in self.folder.parent.glob(f"*/{FILE}"):
            begun += file.stat().st_mtime > time.time() - DAY
        if begun >= self.limits.max_runs:
            raise FedLDError(f"it takes part in at most {self.limits.max_runs} runs within a day")

    def _settings(self, order: Order) -> str:
        """Digest of all that decides what is measured; only the number of rounds may grow."""
        fixed = self.experiment.model_dump(mode="json", exclude={"rounds", "device", "weights"})
        data = [order.classes, order.mean, order.std, order.features, order.target_sums]
        facts = [fixed, *data, order.trunk]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _enter(self, asked: Asked, order: Order, trees: Mapping[str, Tree]) -> None:
        limits, rounds = self.limits, self.experiment.rounds
        announced = digest(trees.get("weights", {}), trees.get("common", {}))
        known = asked.models.setdefault(announced, [])
        if len(asked.models) > 2 * rounds + SPARE:
            raise FedLDError(f"a run of {rounds} rounds has at most {2 * rounds + SPARE} global models")
        for k, job in enumerate(order.jobs):
            name = self._name(k, job, trees)
            if isinstance(job, SiteTestJob) and announced + name not in asked.site_tests:
                asked.site_tests.append(announced + name)
            if name not in known:
                known.append(name)
                asked.measurements += _cost(job)
        trained = sum(name.startswith("train:") for name in known)
        bases = sum(name.startswith("candidates:") for name in known)
        if bases > BASES * trained:
            raise FedLDError(
                f"it measures candidate steps from a model from which it has trained, at most {BASES} sets"
            )
        # A method without a global model announces the same one in every round, and trains in each.
        turns = max(1, trained)
        others = sum(name.startswith("model:") for name in known)
        if others > limits.max_models * turns:
            raise FedLDError(f"it measures at most {limits.max_models} models of other sites in a round")
        if len(known) - others > JOBS_PER_ROUND * turns:
            raise FedLDError(f"it does at most {JOBS_PER_ROUND} different jobs with one global model")
        if turns > 2 * rounds + SPARE:
            raise FedLDError(f"a run of {rounds} rounds trains at most {2 * rounds + SPARE} times")
        if len(asked.site_tests) > SITE_TESTS:
            raise FedLDError(f"it tests at most {SITE_TESTS} models of a run on its test images")
        if asked.measurements > limits.max_measurements:
            raise FedLDError(f"it makes at most {limits.max_measurements} measurements in a run")

    @staticmethod
    def _name(k: int, job: ClientJob, trees: Mapping[str, Tree]) -> str:
        """A name that two jobs share exactly if the second tells nothing that the first did not."""
        message = trees.get(f"message.{k}", {})
        if isinstance(job, LossJob) and job.slot is not None:
            return f"model:{digest({'model': trees['models'][str(job.slot)]}, message)}"
        facts = {key: value for key, value in vars(job).items() if key not in ("incoming", "slot")}
        facts["state_round"] = job.incoming.state_round if job.incoming else None
        parts = [message]
        if isinstance(job, CandidateJob):
            parts.append(trees.get("candidates", {}))
        return f"{job.kind}:{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}{digest(*parts)}"


def _cost(job: ClientJob) -> int:
    """Models that a job measures."""
    if isinstance(job, CandidateJob):
        return len(job.coefficients)
    return 2 if isinstance(job, TrainJob) else 1


def digest(*trees: Mapping[str, Tensor]) -> str:
    """A digest of the names, shapes and numbers of some trees."""
    found = hashlib.sha256()
    for tree in trees:
        for key in sorted(tree):
            value = tree[key].detach().contiguous().cpu()
            found.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
            found.update(value.reshape(-1).numpy().tobytes())
        found.update(b"|")
    return found.hexdigest()[:32]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One order of a run at a time."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
