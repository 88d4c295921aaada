"""How much privacy noisy steps cost: Opacus' PRV accountant (Gopi et al. 2021), loaded when it is needed.

A step takes every record with probability `rate` (Poisson), clips its gradient to length C and adds Gaussian
noise of standard deviation `noise` times C to the sum. Neighbouring data differ by one record more or less.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from fedld.errors import FedLDError

MOST_NOISE = 1e4
TOLERANCE = 0.005  # of a noise multiplier, upwards


@dataclass(frozen=True)
class NoisySteps:
    """Some steps of one kind.

    Args:
        noise: standard deviation of the noise over the clipping length.
        rate: probability with which a step takes a record.
        steps: how many.
    """

    noise: float
    rate: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.noise <= MOST_NOISE or not 0 < self.rate <= 1 or not 0 <= self.steps <= 10**9:
            raise FedLDError(
                f"noise {self.noise:g}, rate {self.rate:g} and {self.steps} steps cannot be accounted for"
            )


def epsilon_of(parts: Iterable[NoisySteps], delta: float) -> float:
    """Epsilon of all steps together at a delta: an upper bound, 0 for no steps.

    Args:
        parts: steps of one or several kinds, taken on the same records.
        delta: between 0 and 1.

    Raises:
        FedLDError: the extra `dp` is not installed, or delta is none.
    """
    if not 0 < delta < 1:
        raise FedLDError(f"delta must be between 0 and 1, not {delta:g}")
    steps: dict[tuple[float, float], int] = {}
    for part in parts:
        if part.steps:
            steps[part.noise, part.rate] = steps.get((part.noise, part.rate), 0) + part.steps
    return _epsilon(tuple((noise, rate, count) for (noise, rate), count in sorted(steps.items())), delta)


@cache
def _epsilon(history: tuple[tuple[float, float, int], ...], delta: float) -> float:
    if not history:
        return 0.0
    accountant = _accountants().PRVAccountant()
    accountant.history = list(history)
    with np.errstate(divide="ignore"), warnings.catch_warnings():  # log(1 - rate) at rate 1; hints on RDP
        warnings.simplefilter("ignore", UserWarning)
        return float(accountant.get_epsilon(delta=delta))


@cache
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Smallest noise multiplier (to half a per cent) with which steps cost at most epsilon.

    Args:
        epsilon: what they may cost.
        delta: between 0 and 1.
        rate: probability with which a step takes a record.
        steps: how many.

    Raises:
        FedLDError: no noise up to 10,000 suffices.
    """
    if not epsilon > 0:
        raise FedLDError(f"epsilon must be above 0, not {epsilon:g}")
    high = 0.5
    while epsilon_of([NoisySteps(high, rate, steps)], delta) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise FedLDError(f"no noise makes {steps} steps at rate {rate:g} cost at most {epsilon:g}")
    low = high / 2 if high > 0.5 else 0.2
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if epsilon_of([NoisySteps(middle, rate, steps)], delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def _accountants() -> Any:
    try:
        return import_module("opacus.accountants")
    except ImportError:
        raise FedLDError(
            "differential privacy needs the accountant of Opacus: pip install 'fedld[dp]'"
        ) from None
