"""Regression: one number per sample, squared error of the standardised target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedld.tasks.base import Task
from fedld.tasks.measure import Measure, Tally


def _r2(tally: Tally) -> float:
    """Compute 1 - sum of squared errors / sum of squared deviations from the mean."""
    s = tally.sums
    spread = s["target_squared"] - s["target"] ** 2 / tally.count if tally.count else 0.0
    return 1 - s["squared"] / spread if spread > 0 else float("nan")


RMSE = Measure(
    name="rmse", title="RMSE", better="less", value=lambda tally: float(np.sqrt(tally.share("squared")))
)
MAE = Measure(name="mae", title="MAE", better="less", value=lambda tally: tally.share("absolute"))
R2 = Measure(name="r2", title="R²", value=_r2)
WORST_CLIENT = Measure(name="worst_client", title="worst client's RMSE", better="less", worst="rmse")
LOSS = Measure(name="loss", title="loss", better="less", value=lambda tally: tally.mean)


@dataclass(frozen=True)
class Regression(Task):
    """Outputs (N, 1) are standardised targets: (target - mean) / deviation over all training samples."""

    name: ClassVar[str] = "regression"
    measures: ClassVar[tuple[Measure, ...]] = (RMSE, MAE, R2, WORST_CLIENT, LOSS)
    mean: float = 0.0
    deviation: float = 1.0

    def target_sums(self, targets: NDArray[np.generic]) -> dict[str, float]:
        """Give the number of targets, their sum and the sum of their squares.

        >>> Regression().target_sums(np.array([1.0, 3.0]))
        {'count': 2.0, 'target': 4.0, 'target_squared': 10.0}
        """
        values = targets.astype(np.float64)
        squares = float(np.square(values).sum())
        return {"count": float(len(values)), "target": float(values.sum()), "target_squared": squares}

    def fitted(self, clients: Sequence[Mapping[str, float]], names: Sequence[str]) -> "Regression":
        """Take mean and deviation from sums over the clients' training targets."""
        count = sum(sums["count"] for sums in clients)
        total = sum(sums["target"] for sums in clients)
        squares = sum(sums["target_squared"] for sums in clients)
        if not count:
            return self
        mean = total / count
        return replace(self, mean=mean, deviation=max(squares / count - mean**2, 0.0) ** 0.5 or 1.0)

    @property
    def constants(self) -> tuple[float, float]:
        """Mean and deviation."""
        return self.mean, self.deviation

    def with_constants(self, constants: Sequence[float]) -> "Regression":
        """Give the task with the mean and deviation of a model file."""
        return replace(self, mean=float(constants[0]), deviation=float(constants[1]))

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean squared error of a batch."""
        return (outputs[:, 0] - (targets - self.mean) / self.deviation).square().mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the squared error of every sample, in units of the deviation.

        >>> Regression(mean=10.0, deviation=2.0).losses(torch.tensor([[0.5]]), torch.tensor([12.0]))
        tensor([0.2500], dtype=torch.float64)
        """
        return (outputs[:, 0].double() - (targets.double() - self.mean) / self.deviation).square()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Give sums of errors and targets, in the target's own unit."""
        t = targets.double()
        error = self.values(outputs) - t
        return {
            "absolute": error.abs().sum().item(),
            "squared": error.square().sum().item(),
            "target": t.sum().item(),
            "target_squared": t.square().sum().item(),
        }

    def values(self, outputs: Tensor) -> Tensor:
        """Give predictions in the target's own unit."""
        return outputs[:, 0].double() * self.deviation + self.mean

    def predicted(self, outputs: Tensor, names: Sequence[str]) -> dict[str, list[str]]:
        """Give the predicted values."""
        return {"predicted": [f"{value:.9g}" for value in self.values(outputs).tolist()]}

    def targets(self, targets: NDArray[np.generic], names: Sequence[str]) -> dict[str, list[str]]:
        """Give the true values."""
        return {"label": [f"{value:.9g}" for value in targets]}

    def batch(self, outputs: int) -> tuple[Tensor, Tensor]:
        """Give outputs and targets to try functions on."""
        return torch.zeros(4, 1), torch.arange(4.0)


@dataclass(frozen=True)
class AbsoluteRegression(Regression):
    """Regression by the absolute error: the median of the target, which few extreme values move little."""

    name: ClassVar[str] = "regression-absolute"
    kind: ClassVar[str] = "regression"

    def objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the mean absolute error of a batch."""
        return (outputs[:, 0] - (targets - self.mean) / self.deviation).abs().mean()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Give the absolute error of every sample, in units of the deviation.

        >>> AbsoluteRegression(mean=10.0, deviation=2.0).losses(torch.tensor([[0.5]]), torch.tensor([12.0]))
        tensor([0.5000], dtype=torch.float64)
        """
        return (outputs[:, 0].double() - (targets.double() - self.mean) / self.deviation).abs()
