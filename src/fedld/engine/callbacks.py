"""Callbacks: what a user adds to a run, in three methods; a function of record and model is one too."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedld.config.experiment import Experiment
from fedld.errors import FedLDError
from fedld.records.schema import ROUNDS, RoundLine, Summary
from fedld.records.writer import each_line

if TYPE_CHECKING:  # the readers of records, trackers among them, start without torch
    from torch import nn


class Callback:
    """Base of all callbacks; a subclass overrides the methods it needs.

    Attributes:
        sees_model: whether `after_round` looks at the model; where no callback does, none is made.

    >>> import fedld
    >>> class Rounds(fedld.Callback):
    ...     def begin(self, experiment, out):
    ...         self.seen = []
    ...     def after_round(self, line, model):
    ...         self.seen.append(line["round"])
    ...         return line["round"] == 2  # ends the run
    >>> rounds = Rounds()
    >>> data = fedld.data("digits", clients=3)
    >>> _ = fedld.run("fedavg", data, rounds=3, workers=0, callbacks=[rounds])
    >>> rounds.seen
    [1, 2]
    """

    sees_model: bool = True

    def begin(self, experiment: Experiment, out: Path) -> None:
        """Begin or continue a run.

        Args:
            experiment: its settings.
            out: its folder, with the records of the rounds that are done.
        """

    def after_round(self, line: RoundLine, model: "nn.Module") -> bool | None:
        """Look at a finished round.

        Args:
            line: the round's record.
            model: the global model after the round, in eval mode.

        Returns:
            True to end the run after this round.
        """
        return None

    def end(self, summary: Summary) -> None:
        """Look at the finished run.

        Args:
            summary: its summary, as in summary.json.
        """


Function = Callable[[RoundLine, "nn.Module"], bool | None]


class _FromFunction(Callback):
    """A function as a callback."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def after_round(self, line: RoundLine, model: "nn.Module") -> bool | None:
        """Call the function."""
        return self.function(line, model)


class EarlyStopping(Callback):
    """End a run after so many rounds without a lower loss on the images that clients set aside.

    Args:
        rounds: how many; the setting `patience` makes one of these.
    """

    sees_model = False

    def __init__(self, rounds: int) -> None:
        self.rounds, self.least, self.best = rounds, math.inf, 0

    def begin(self, experiment: Experiment, out: Path) -> None:
        """Look at the rounds that are done."""
        for line in each_line(out, ROUNDS) if (out / ROUNDS.name).exists() else ():
            self._see(line)

    def after_round(self, line: RoundLine, model: "nn.Module") -> bool | None:
        """Say whether the last `rounds` rounds brought nothing."""
        self._see(line)
        return line["round"] - self.best >= self.rounds

    def _see(self, line: RoundLine) -> None:
        loss = line["validation"].get("loss") if "validation" in line else None
        if loss is not None and loss < self.least:
            self.least, self.best = loss, line["round"]


def callbacks_of(experiment: Experiment, given: Sequence[Any]) -> list[Callback]:
    """Make the callbacks of a run: the user's own, and those of its settings.

    Raises:
        FedLDError: One is no callback, or patience has no validation images to go by.
    """
    callbacks = [as_callback(callback) for callback in given]
    if experiment.patience is not None:
        callbacks.append(EarlyStopping(experiment.patience))
    if experiment.validation is None and any(isinstance(callback, EarlyStopping) for callback in callbacks):
        raise FedLDError("patience goes by the loss on validation images: give --validation SHARE too")
    return callbacks


def as_callback(value: Any) -> Callback:
    """Take a callback or a function.

    Raises:
        FedLDError: It is neither.
    """
    if isinstance(value, Callback):
        return value
    if not callable(value) or isinstance(value, type):
        raise FedLDError(
            f"a callback is a function of a round's record and model, or a Callback, not {value!r:.80}"
        )
    return _FromFunction(value)
