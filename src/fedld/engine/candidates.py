"""The exchange of measured aggregation: directions once down to the clients, one number per candidate up."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fedld.aggregation import Candidates, Vote
from fedld.engine.jobs import CandidateJob, Failure, Incoming, Job, Setup, SharedMemory
from fedld.records.schema import Traffic


class Measuring:
    """Asks the clients of a round to measure candidate steps, and keeps account of what that cost.

    `models` are what the clients hold after their training.
    """

    def __init__(
        self,
        setup: Setup,
        memory: SharedMemory,
        do: Callable[[Sequence[Job]], list[Any]],
        round_: int,
        models: Sequence[Incoming],
    ) -> None:
        self.setup, self.memory, self.do, self.round, self.models = setup, memory, do, round_, models
        self.seconds, self.bytes_down, self.bytes_up = 0.0, 0, 0

    def __call__(self, candidates: Candidates, buffers: Tensor) -> Mapping[str, Vote | str]:
        """What every client measured, by name, or why it did not."""
        start, layout, basis = time.perf_counter(), self.setup.layout, self.memory.basis
        layout.shared_parameters(basis[:-1]).copy_(candidates.basis)
        layout.shared_buffers(basis[-1]).copy_(buffers)
        coefficients, samples = candidates.coefficients, candidates.samples
        jobs = [CandidateJob(self.round, model, coefficients, samples) for model in self.models]
        answers = {
            model.client: f"it could not measure: {result.error}" if isinstance(result, Failure) else result
            for model, result in zip(self.models, self.do(jobs), strict=True)
        }
        self.seconds += time.perf_counter() - start
        self.bytes_down += 4 * len(jobs) * (candidates.basis.numel() + buffers.numel())
        self.bytes_up += 16 * len(jobs) * len(candidates.coefficients)
        return answers

    def cost(self, traffic: Traffic) -> Traffic:
        """The round's traffic with that of the exchange, and the time it took."""
        if not self.seconds:
            return traffic
        return {
            "bytes_down": traffic["bytes_down"] + self.bytes_down,
            "bytes_up": traffic["bytes_up"] + self.bytes_up,
            "measuring_seconds": self.seconds,
        }
