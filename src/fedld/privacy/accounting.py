"""How much privacy noisy steps cost: Opacus' PRV accountant (Gopi et al. 2021), loaded when it is needed.

A step takes every record with probability `rate` (Poisson), clips its gradient to length C and adds Gaussian
noise of standard deviation `noise` times C to the sum. Neighbouring data differ by one record more or less.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from fedld.errors import FedLDError

MOST_NOISE = 1e4
TOLERANCE = 0.01  # of a noise multiplier, upwards


@dataclass(frozen=True, kw_only=True)
class PrivacyTarget:
    """What a run's records may cost at most.

    Args:
        epsilon: of every client's records over the whole run.
        delta: at which epsilon is counted.
        clip: largest length of a record's gradient.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1e3 or not 0 < self.delta < 1 or not 0 < self.clip < 1e6:
            raise FedLDError(
                "dp needs epsilon from 0 to 1000, delta from 0 to 1 and a positive clip, not "
                f"{self.epsilon:g}, {self.delta:g} and {self.clip:g}"
            )


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
    """Smallest noise multiplier (to one per cent) with which steps cost at most epsilon.

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

    def cost(noise: float) -> float:
        return epsilon_of([NoisySteps(noise, rate, steps)], delta)

    # Renyi's bound takes a tenth of the time and is mostly a few per cent too large: it gives the upper end.
    high = _least_noise(lambda noise: _renyi(noise, rate, steps, delta), epsilon, 0.3, MOST_NOISE / 2, 0.05)
    while cost(high) > epsilon:
        high *= 1.2
        if high > MOST_NOISE:
            raise FedLDError(f"no noise makes {steps} steps at rate {rate:g} cost at most {epsilon:g}")
    return _least_noise(cost, epsilon, 0.7 * high, high, TOLERANCE)


def _least_noise(
    cost: Callable[[float], float], epsilon: float, low: float, high: float, tolerance: float
) -> float:
    """Smallest noise between two that costs at most epsilon, by bisection of logarithms; `high` if none."""
    while high > low * (1 + tolerance):
        middle = (low * high) ** 0.5
        if cost(middle) > epsilon:
            low = middle
        else:
            high = middle
    return high


def _renyi(noise: float, rate: float, steps: int, delta: float) -> float:
    accountant = _accountants().RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # hints on its range of orders
        return float(accountant.get_epsilon(delta=delta))


def _accountants() -> Any:
    try:
        return import_module("opacus.accountants")
    except ImportError:
        raise FedLDError(
            "differential privacy needs the accountant of Opacus: pip install 'fedld[dp]'"
        ) from None
