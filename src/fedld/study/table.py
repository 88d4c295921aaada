"""The table of a comparison: mean and spread over seeds, paired difference to the baseline, costs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, stdev
from typing import Any, ClassVar

from fedld.analysis.statistics import holm, paired_difference
from fedld.engine.records import Line
from fedld.study.causes import Cause

WHY = (
    "The server's step beside the plain average's (length and cosine, mean over rounds and seeds), and the "
    "terms of the loss in the last decomposed round (Eq. 2; run with --decompose to have them)."
)


@dataclass(frozen=True)
class Row:
    """One method. Accuracies in percent, the global model's and the personalised ones' in columns apart."""

    label: str
    seeds: list[int]
    final: list[float] | None
    last5: list[float] | None
    best: list[float] | None
    personal: list[float] | None
    difference: float | None
    interval: tuple[float, float] | None
    p_value: float | None
    megabytes: float
    seconds: float

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "final, %",
        "difference [95 %]",
        "p (Holm)",
        "last 5",
        "best",
        "personalised",
        "MB",
        "s",
    )

    def cells(self) -> list[str]:
        """The row's cells as text, in the order of `COLUMNS`."""
        difference = "" if self.difference is None else f"{self.difference:+.2f}"
        if self.interval is not None:
            difference += f" [{self.interval[0]:+.2f}, {self.interval[1]:+.2f}]"
        return [
            spread(self.final),
            difference,
            "" if self.p_value is None else f"{self.p_value:.3f}",
            spread(self.last5),
            spread(self.best),
            spread(self.personal),
            f"{self.megabytes:.1f}",
            f"{self.seconds:.0f}",
        ]


def spread(values: Sequence[float] | None) -> str:
    """Mean ± standard deviation.

    >>> spread([80.0, 82.0]), spread([80.0]), spread(None)
    ('81.00 ± 1.41', '80.00', '-')
    """
    if not values:
        return "-"
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def markdown(rows: list[list[str]]) -> str:
    """GitHub's table format; the first row is the head."""
    head, *body = rows
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Table:
    """A comparison, ready to print: what came out, and what the records say about why."""

    title: str
    baseline: str
    rows: list[Row]
    causes: list[Cause] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def to_markdown(self) -> str:
        """Both tables under the title."""
        head = ["method", *Row.COLUMNS]
        rows = markdown([head, *([row.label, *row.cells()] for row in self.rows)])
        return f"{self.title}\n\n{rows}\n{self.why()}"

    def why(self) -> str:
        """The causes as a table with its legend; nothing if there are none."""
        if not self.causes:
            return ""
        head = ["why", *Cause.COLUMNS]
        return f"\n{WHY}\n\n{markdown([head, *([c.label, *c.cells()] for c in self.causes)])}\n"


def make_table(title: str, summaries: dict[str, list[Line]], baseline: str) -> Table:
    """Table from every label's summaries, one a seed, in the same order of seeds."""
    base = _percent(summaries[baseline], "final_accuracy")
    finals = {label: _percent(runs, "final_accuracy") for label, runs in summaries.items()}
    differences = {
        label: paired_difference(final, base)
        for label, final in finals.items()
        if label != baseline and final and base
    }
    adjusted = dict(zip(differences, holm([d.p_value for d in differences.values()]), strict=True))
    rows = []
    for label, runs in summaries.items():
        d = differences.get(label)
        rows.append(
            Row(
                label,
                [run["seed"] for run in runs],
                finals[label],
                _percent(runs, "last5_accuracy"),
                _percent(runs, "best_accuracy"),
                _percent(runs, "personal_final_accuracy"),
                d.mean if d else None,
                d.interval if d else None,
                adjusted.get(label),
                fmean(run["bytes_up"] + run["bytes_down"] for run in runs) / 1e6,
                fmean(run["seconds"] for run in runs),
            )
        )
    return Table(title, baseline, rows)


def _percent(runs: list[Line], key: str) -> list[float] | None:
    values = [run.get(key) for run in runs]
    return None if any(v is None for v in values) else [100 * v for v in values if v is not None]
