"""The clients' learning rate over the rounds of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fedld.errors import FedLDError
from fedld.registry import Registry, require_callable

Kind = Literal["constant", "cosine", "step", "own"]
SCHEDULES: Registry[Kind] = Registry(
    "lr_schedule",
    {"constant": "constant", "cosine": "cosine", "step": "step"},
    accept=require_callable("lr_schedule", "or a function from the round (1, 2, ...) to a factor of lr"),
)


@dataclass(frozen=True)
class Schedule:
    """What the learning rate is multiplied by in a round.

    warmup: rounds in which the factor grows by equal steps, to reach 1 in the round after them.
    constant: 1.
    cosine: (1 + cos(pi t / T)) / 2 in round t = 0 .. T - 1 after the warm-up, so that the last still moves.
    step: `decay` once more after every `every` rounds.
    own: what the user's `function` of the round says, without a warm-up of ours.

    >>> [Schedule("step", rounds=7, warmup=1, every=2, decay=0.5).factor(r) for r in range(1, 8)]
    [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """

    kind: Kind = "constant"
    rounds: int = 1
    warmup: int = 0
    every: int = 1
    decay: float = 0.1
    function: Callable[[int], float] | None = None

    def factor(self, round_: int) -> float:
        """Factor in a round, the first being 1.

        Raises:
            FedLDError: the user's function fails, or gives no positive number.
        """
        if self.function is not None:
            return _own_factor(self.function, round_)
        after = round_ - 1 - self.warmup
        if after < 0:
            return round_ / (self.warmup + 1)
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                return (1 + math.cos(math.pi * after / max(1, self.rounds - self.warmup))) / 2
            case "step":
                return float(self.decay ** (after // self.every))
            case "own":
                raise FedLDError("a schedule of one's own needs its function")


def _own_factor(function: Callable[[int], float], round_: int) -> float:
    try:
        factor = float(function(round_))
    except Exception as error:  # whatever the user's function raises
        text = f"lr_schedule failed in round {round_}: {type(error).__name__}: {error}"
        raise FedLDError(text) from error
    if not 0 < factor < math.inf:
        raise FedLDError(f"lr_schedule gave {factor} in round {round_}: a factor of lr must be positive")
    return factor
