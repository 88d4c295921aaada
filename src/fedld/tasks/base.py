"""What a task is: outputs and targets, the loss of a sample, the tally of a batch, and its measures."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.errors import FedLDError
from fedld.tasks.measure import Measure, SamplePredictions, SampleTally, Scores, Tally
from fedld.tasks.metrics import Metric

CHUNK = 512  # samples of a test set that user metrics get at once


@dataclass(frozen=True)
class Task(ABC):
    """One kind of learning problem. The first measure is the one that decides unless another is named."""

    name: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]
    lacks: ClassVar[str] = "has no classes"
    """What the task has in the place of one class a sample, for sentences that refuse a method."""
    kind: ClassVar[str] = ""
    """The task that has the same data, where several tasks take the same."""
    dense: ClassVar[bool] = False
    """Whether a model gives its outputs for every pixel."""

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the plain loss of every sample, in float64 so that sums over many are exact enough.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.

        Returns:
            (N,) losses.
        """

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Compute the further sums of a batch.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.

        Returns:
            Sums by name.
        """

    @abstractmethod
    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of a batch, to be minimised.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.

        Returns:
            A scalar with a gradient.
        """

    @abstractmethod
    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Make the columns of a table of predictions, one row per sample.

        Args:
            outputs: (N, ...) outputs of a model.
            names: of the outputs.

        Returns:
            Cells by column.
        """

    @abstractmethod
    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Make the columns of a table of predictions that say what is true of every sample.

        Args:
            targets: (N, ...) targets.
            names: of the outputs.

        Returns:
            Cells by column.
        """

    @abstractmethod
    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Make a few outputs and targets to try a user's functions on.

        Args:
            outputs: number of outputs.

        Returns:
            Outputs and targets.
        """

    def strata(self, targets: NDArray[np.generic]) -> NDArray[np.int64]:
        """Group the samples; sites do not tell the size of a small group.

        Args:
            targets: (N, ...) targets.

        Returns:
            (N,) groups; one group for all where there are no classes.
        """
        return np.zeros(len(targets), np.int64)

    def strata_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Name the groups of `strata`.

        Args:
            names: of the outputs.

        Returns:
            One name per group.
        """
        return ("all",)

    def cases(
        self, outputs: Tensor, targets: NDArray[np.generic], names: Sequence[str]
    ) -> dict[str, list[str]]:
        """Make the columns of a table of predictions that compare prediction and truth of every sample.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.
            names: of the outputs.

        Returns:
            Cells by column.
        """
        return {
            name: [f"{value:.6g}" for value in column]
            for name, column in self.case_values(outputs, targets, names).items()
        }

    def case_values(
        self, outputs: Tensor, targets: NDArray[np.generic], names: Sequence[str]
    ) -> dict[str, NDArray[np.float64]]:
        """Compute measures of every single sample.

        Args:
            outputs: of the model.
            targets: of the samples.
            names: of the model's outputs.

        Returns:
            Values by measure; none where only many samples together have one.
        """
        return {}

    @property
    def data(self) -> str:
        """The task that its data is for."""
        return self.kind or self.name

    @property
    def constants(self) -> tuple[float, float]:
        """Two numbers that `fitted` found and a model file keeps."""
        return 0.0, 1.0

    def with_constants(self, constants: Sequence[float]) -> "Task":
        """Give the task with the numbers of a model file.

        Args:
            constants: the numbers that the model file holds.

        Returns:
            The task that predicts with them.
        """
        return self

    def output_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Give the names of the model's outputs, from those that the data has.

        Args:
            names: names in the data.

        Returns:
            One name for each output.
        """
        return tuple(names)

    def target_sums(self, targets: NDArray[np.generic]) -> dict[str, float]:
        """Compute sums over a client's training targets that `fitted` needs.

        Args:
            targets: (N, ...) training targets.

        Returns:
            Sums by name; none by default.
        """
        return {}

    def fitted(self, clients: Sequence[Mapping[str, float]], names: Sequence[str]) -> "Task":
        """Take what the task needs of all clients' training targets, from sums over them.

        Args:
            clients: `target_sums` of every client, or those of all clients as one.
            names: of the model's outputs.

        Returns:
            The task that is used in the run.
        """
        return self

    def tally(self, outputs: Tensor, targets: Tensor) -> Tally:
        """Tally a batch.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.

        Returns:
            Sums that merge by adding.
        """
        losses = self.losses(outputs, targets)
        return Tally(
            len(targets), losses.sum().item(), losses.square().sum().item(), self.sums(outputs, targets)
        )

    def sample_tally(self, outputs: Tensor, targets: Tensor) -> SampleTally:
        """Tally a batch and keep its predictions, for measures that need all of them.

        Args:
            outputs: (N, ...) outputs of a model.
            targets: (N, ...) targets.

        Returns:
            The tally with predictions.
        """
        plain = self.tally(outputs, targets)
        kept = SamplePredictions(np.asarray(outputs.detach().double().cpu()), np.asarray(targets.cpu()))
        return SampleTally(plain.count, plain.loss, plain.loss_squared, plain.sums, predictions=kept)

    def scores(self, tally: Tally, further: Mapping[str, Measure] | None = None) -> Scores:
        """Compute all measures that a tally allows.

        Args:
            tally: sums, or sums with predictions.
            further: a user's measures, computed where there are predictions.

        Returns:
            Values by name, and `count`.
        """
        exact = isinstance(tally, SampleTally)
        chosen = [m for m in self.measures if m.value is not None and (exact or not m.exact)]
        chosen += list((further or {}).values()) if exact else []
        return {"count": tally.count} | {measure.name: defined(measure, tally) for measure in chosen}

    def measure(self, name: str) -> Measure:
        """Find a measure by name.

        Args:
            name: its name.

        Returns:
            The measure.
        """
        return next(measure for measure in self.measures if measure.name == name)


def defined(measure: Measure, tally: Tally) -> float | None:
    """Give a measure's value; None where it is not defined: no sample, one class, a diverged model."""
    assert measure.value is not None
    value = measure.value(tally)
    return float(value) if value is not None and np.isfinite(value) else None


def worst_client(measures: Iterable[Measure], clients: Mapping[str, Scores]) -> Scores:
    """Give the measures that are the worst client's value of another one.

    A client without a value (a diverged loss) makes the worst one undefined.
    """
    by_name = {measure.name: measure for measure in measures}
    worst: Scores = {}
    for measure in by_name.values():
        if measure.worst is None or not clients:
            continue
        values = [scores.get(measure.worst) for scores in clients.values()]
        numbers = [value for value in values if value is not None]
        complete = len(numbers) == len(values)
        worst[measure.name] = by_name[measure.worst].worst_of(numbers) if complete else None
    return worst


def further_measures(metrics: Mapping[str, Metric]) -> dict[str, Measure]:
    """Make measures of a user's metrics, by name."""
    return {
        name: Measure(
            name=name,
            title=metric.title or name,
            unit=metric.unit,
            scale=metric.scale,
            digits=metric.digits,
            better=metric.better,
            value=_Value(name, metric),
            exact=True,
        )
        for name, metric in metrics.items()
    }


@dataclass(frozen=True)
class _Value:
    """The value of a user's metric: sums of parts of the samples, merged as those of sites are."""

    name: str
    metric: Metric

    def __call__(self, tally: Tally) -> float:
        assert isinstance(tally, SampleTally)
        outputs = torch.from_numpy(tally.predictions.outputs).float()
        targets = torch.from_numpy(np.array(tally.predictions.targets))
        parts = zip(torch.split(outputs, CHUNK), torch.split(targets, CHUNK), strict=True)
        try:
            return self.metric.merged([self.metric.added(*part) for part in parts])
        except FedLDError:
            raise
        except Exception as error:  # whatever the user's function raises
            message = f"metric '{self.name}' failed: {type(error).__name__}: {error}"
            raise FedLDError(message) from error
