"""Experiment trackers by one interface, fed with the records: while a run goes on, or afterwards.

TensorBoard, MLflow (a local store) and Weights & Biases (offline mode); each an extra of its own, imported
only when asked for. Nothing is sent anywhere: a tracker writes files, and its own tools upload them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedld.config.experiment import Experiment
from fedld.engine.callbacks import Callback
from fedld.errors import FedLDError
from fedld.paths import user_path
from fedld.records.reader import Run, read
from fedld.records.schema import ROUNDS, RoundLine, Summary
from fedld.records.tables import flat_round, flatten
from fedld.records.writer import each_line
from fedld.registry import Registry, require_callable

if TYPE_CHECKING:
    from torch import nn

Scalars = dict[str, float]


class Tracker(Protocol):
    """Takes the settings when it is made, then one call a round, then the end."""

    def log(self, round: int, scalars: Scalars) -> None:
        """Log the measures of a round."""

    def close(self) -> None:
        """Write everything out."""


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, out: Path, name: str, settings: dict[str, str]) -> None:
        _need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / name))
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
        self._writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}")

    def log(self, round: int, scalars: Scalars) -> None:
        """Log the measures of a round."""
        for key, value in scalars.items():
            self._writer.add_scalar(key, value, round)

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()


class MLflow:
    """A run in a local MLflow store, for `mlflow ui --backend-store-uri`."""

    def __init__(self, out: Path, name: str, settings: dict[str, str]) -> None:
        # Read on import: a folder as store, and no reports to MLflow's makers.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = _need("mlflow", "mlflow")
        out.mkdir(parents=True, exist_ok=True)
        self._client = mlflow.MlflowClient(out.resolve().as_uri())
        existing = self._client.get_experiment_by_name("fedld")
        experiment = existing.experiment_id if existing else self._client.create_experiment("fedld")
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._run, key, value)

    def log(self, round: int, scalars: Scalars) -> None:
        """Log the measures of a round."""
        for key, value in scalars.items():
            self._client.log_metric(self._run, key, value, step=round)

    def close(self) -> None:
        """Write everything out."""
        self._client.set_terminated(self._run)


class WandB:
    """An offline run of Weights & Biases, for `wandb sync`."""

    def __init__(self, out: Path, name: str, settings: dict[str, str]) -> None:
        wandb = _need("wandb", "wandb")
        out.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project="fedld", name=name, dir=str(out), config=settings, mode="offline", settings=quiet
        )

    def log(self, round: int, scalars: Scalars) -> None:
        """Log the measures of a round."""
        self._run.log(scalars, step=round)

    def close(self) -> None:
        """Write everything out."""
        self._run.finish()


MakeTracker = Callable[[Path, str, dict[str, str]], Tracker]
TRACKERS: Registry[MakeTracker] = Registry(
    "tracker",
    {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB},
    accept=require_callable("tracker", "or a function of folder, name and settings that makes a tracker"),
)
TRACKERS.load_plugins()


class Tracking(Callback):
    """Give a tracker every round of a run: `fedld.run(..., callbacks=[Tracking("tensorboard", "board")])`.

    A run that is continued gives it the rounds that are done first.

    Args:
        tracker: a name of `TRACKERS`, or a function of folder, name and settings that makes a tracker.
        out: folder that the tracker writes to.
        name: of the run in it; default: the name of the run's folder.
    """

    sees_model = False

    def __init__(self, tracker: str | MakeTracker, out: str | Path, name: str | None = None) -> None:
        self.make = TRACKERS.resolve(tracker)
        self.out, self.name = user_path(out), name

    def begin(self, experiment: Experiment, out: Path) -> None:
        """Make the tracker."""
        settings = flatten(experiment.model_dump(mode="json"))
        self.tracker = self.make(self.out, self.name or out.name, settings)
        for line in each_line(out, ROUNDS):
            self.tracker.log(line["round"], scalars(line))

    def after_round(self, line: RoundLine, model: "nn.Module") -> None:
        """Pass the measures of the round on."""
        self.tracker.log(line["round"], scalars(line))

    def end(self, summary: Summary) -> None:
        """Let the tracker write everything out."""
        self.tracker.close()


def replay(paths: Sequence[Path], tracker: str, out: Path) -> None:
    """Give a tracker the records of runs that exist already."""
    for run in read(paths).runs:
        made = TRACKERS.find(tracker)(out, _name(run), flatten(run.config))
        try:
            for line in run.rounds.lines:
                made.log(line["round"], scalars(line))
        finally:
            made.close()


def scalars(line: Mapping[str, object]) -> Scalars:
    """Select the numbers of a round.

    >>> scalars({"round": 3, "test": {"accuracy": 0.5, "auroc": None}, "validation": {"loss": 0.7}})
    {'accuracy': 0.5, 'validation_loss': 0.7}
    """
    skip = ("round", "rounds")
    return {
        key: float(value)
        for key, value in flat_round(line).items()
        if key not in skip and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _name(run: Run) -> str:
    """Make a name that is one folder, whatever a label contains."""
    text = f"{run.label}-seed{run.seed}" + ("" if run.fold is None else f"-fold{run.fold}")
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).lstrip(".") or "run"


def _need(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise FedLDError(f"this tracker needs {module}: pip install 'fedld[{extra}]'") from None
