"""What the runs' records say about the reasons for their accuracies: the server's step and the loss terms."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from fedld.engine.records import Line
from fedld.study.runs import number, read_run

TERMS = ("local_loss", "shift_loss", "aggregation_loss", "global_loss")


@dataclass(frozen=True)
class Cause:
    """One method, means over its seeds; None where nothing was recorded.

    `step` and `cosine` compare the server's step with the plain average's over all rounds; the terms are
    those of the last decomposed round (Eq. 2).
    """

    label: str
    step: float | None
    cosine: float | None
    local: float | None
    shift: float | None
    aggregation: float | None
    total: float | None

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "step / average's",
        "cosine",
        "local loss",
        "+ shift",
        "+ aggregation",
        "= global loss",
    )

    def cells(self) -> list[str]:
        """The cells as text, in the order of `COLUMNS`."""
        signed = [self.shift, self.aggregation]
        return [
            *(_text(value, ".2f") for value in (self.step, self.cosine, self.local)),
            *(_text(value, "+.2f") for value in signed),
            _text(self.total, ".2f"),
        ]


def cause_of(label: str, runs: Sequence[Path]) -> Cause:
    """Mean over a method's runs, read from their records."""
    rounds = [read_run(path).rounds.lines for path in runs]

    served = any(line.get("accuracy") is not None for lines in rounds for line in lines)

    def over(key: str) -> float | None:
        return _mean([_mean([number(line, key) for line in lines]) for lines in rounds]) if served else None

    local, shift, aggregation, total = (_mean([_last(lines, key) for lines in rounds]) for key in TERMS)
    step, cosine = over("norm_ratio"), over("cosine_to_average")
    if not served:  # `local` has no server: the average that was decomposed is nobody's model
        aggregation = total = None
    return Cause(label, step, cosine, local, shift, aggregation, total)


def _last(lines: list[Line], key: str) -> float | None:
    values = [number(line, key) for line in lines]
    return next((value for value in reversed(values) if isfinite(value)), None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and isfinite(value)]
    return fmean(known) if known else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
