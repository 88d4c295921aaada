"""Who takes which job, where workers are not equally fast: other programs may have taken half a core.

Jobs go out longest first, each to the worker that would end it first. A worker that has been slow therefore
leaves a long job near the end of a round to one that is still busy but faster, and takes a shorter one, or
none. Results do not depend on who takes what, so all this may follow the clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEARN = 0.5  # weight of the newest job in a worker's pace


@dataclass(frozen=True)
class Unit:
    """Places of jobs that one worker does together, their kind, and what they cost in forward passes."""

    places: tuple[int, ...]
    kind: str
    cost: float


class Paces:
    """Seconds that jobs of a kind take per unit of cost, and how much slower than that each worker is."""

    def __init__(self, workers: int) -> None:
        self._rates: dict[str, float] = {}
        self._slowness = [1.0] * workers

    def expected(self, worker: int, unit: Unit) -> float:
        """Seconds that a unit would take; before the first of its kind is done, its cost."""
        return unit.cost * self._rates.get(unit.kind, 1.0) * self._slowness[worker]

    def left(self, worker: int, unit: Unit, seconds: float) -> float:
        """Seconds until a unit will be done that a worker has been at for some; one that is late stays so."""
        return max(self.expected(worker, unit) - seconds, seconds / 4)

    def learn(self, worker: int, unit: Unit, seconds: float) -> None:
        """Take note of a unit that is done."""
        if unit.cost <= 0 or seconds <= 0:
            return
        rate = seconds / unit.cost
        known = self._rates.setdefault(unit.kind, rate / self._slowness[worker])
        self._slowness[worker] += LEARN * (rate / known - self._slowness[worker])
        self._rates[unit.kind] += LEARN * (rate / self._slowness[worker] - known)

    def choose(self, worker: int, waiting: Sequence[Unit], left: Sequence[float]) -> int | None:
        """Place of the unit that an idle worker takes, or None if others would end all of them earlier.

        The longest of `waiting` is the last; `left` are the seconds until each worker is free.
        """
        free = list(left)
        for place in reversed(range(len(waiting))):
            ends = [time + self.expected(k, waiting[place]) for k, time in enumerate(free)]
            first = min(range(len(ends)), key=lambda k: (ends[k], k != worker))
            if first == worker:
                return place
            free[first] = ends[first]
        return None
