"""Fig. 2 of the paper: what one round loses to shift and to aggregation as heterogeneity grows.

Four arms start from the same weights on the same partition: `plain` (cross-entropy, mean), `margin` (margin
control, mean), `principal` (cross-entropy, principal rule) and, not in the paper, `measured` (cross-entropy,
measured rule). Randomness does not depend on the rule, so all but `margin` aggregate the same local models.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fedld.analysis import PairedDifference, paired_difference
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_measures
from fedld.errors import FedLDError
from fedld.records.schema import ROUNDS, Event
from fedld.records.tables import no_html
from fedld.records.writer import read_lines, write_atomically
from fedld.study.compare import StudyPlan, open_study, short_name
from fedld.study.grid import Cell, run_grid

ALPHAS = (100.0, 10.0, 1.0, 0.1, 0.01)
CONTRASTS = {
    "shift": ("margin",),
    "aggregation": ("principal", "measured"),
}  # a term, the arms that are to lower it


@dataclass(frozen=True, kw_only=True)
class Point:
    """Signed terms of Eq. 2 after the one round of an arm."""

    arm: str
    alpha: float
    seed: int
    local: float
    shift: float
    aggregation: float
    total: float


@dataclass(frozen=True)
class Figure2:
    """All points, and how they were made."""

    title: str
    command: str
    settings: dict[str, Any]
    points: list[Point]

    def values(self, arm: str, term: str, alpha: float) -> list[float]:
        """List a term of all seeds, in their order."""
        return [getattr(p, term) for p in self.points if (p.arm, p.alpha) == (arm, alpha)]

    def difference(self, arm: str, term: str, alpha: float, absolute: bool = False) -> PairedDifference:
        """Compare an arm with plain, paired over seeds."""
        ours, plain = (self.values(name, term, alpha) for name in (arm, "plain"))
        return paired_difference(list(map(abs, ours)), list(map(abs, plain))) if absolute else (
            paired_difference(ours, plain)
        )  # fmt: skip

    @property
    def alphas(self) -> list[float]:
        """From nearly equal clients to heterogeneous ones."""
        return sorted({point.alpha for point in self.points}, reverse=True)

    @property
    def contrasts(self) -> dict[str, list[str]]:
        """A term and the arms that are to lower it, as far as they were run."""
        run = {point.arm for point in self.points}
        return {term: [arm for arm in arms if arm in run] for term, arms in CONTRASTS.items()}

    def to_json(self) -> dict[str, Any]:
        """Give points and paired differences, signed and absolute."""
        differences = [
            {"term": term, "arm": arm, "alpha": alpha, "absolute": absolute}
            | asdict(self.difference(arm, term, alpha, absolute))
            for term, arms in self.contrasts.items()
            for arm in arms
            for alpha in self.alphas
            for absolute in (False, True)
        ]
        return {**asdict(self), "differences": differences}

    def to_markdown(self) -> str:
        """Tabulate the signed terms, mean over seeds, and what each arm changes."""
        head = ["alpha"]
        for term, arms in self.contrasts.items():
            head += [f"{term} plain", *(f"{arm} - plain [95 %]" for arm in arms)]
        rows = [head, ["---:"] * len(head)]
        for alpha in self.alphas:
            cells = [f"{alpha:g}"]
            for term, arms in self.contrasts.items():
                cells.append(f"{fmean(self.values('plain', term, alpha)):+.4f}")
                cells += [_interval(self.difference(arm, term, alpha)) for arm in arms]
            rows.append(cells)
        table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        return no_html(f"# {self.title}\n\n{table}\n\nMade by `{self.command}`.\n")


def _interval(difference: PairedDifference) -> str:
    text = f"{difference.mean:+.4f}"
    if difference.interval is not None:
        text += f" [{difference.interval[0]:+.4f}, {difference.interval[1]:+.4f}]"
    return text


@dataclass(frozen=True)
class FigurePlan:
    """What to run: the warm start of every seed (none without warm rounds), then one round of every arm."""

    warm: list[Cell]
    study: StudyPlan

    @property
    def rounds(self) -> int:
        """Rounds of all runs together."""
        return sum(cell.experiment.rounds for cell in self.warm) + self.study.rounds


def plan(
    settings: dict[str, Any],
    seeds: Sequence[int],
    out: Path,
    *,
    command: str,
    warm_rounds: int = 0,
    warm_lr: float | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> FigurePlan:
    """Plan every arm at every alpha and seed; `objective` and `rule` in the settings replace the paper's."""
    if warm_rounds and "weights" in settings:
        raise FedLDError("give either weights or warm rounds, not both")
    shared = {"workers": 0, "min_size": 10} | settings
    margin, rule = shared.pop("objective", "marg-log"), shared.pop("rule", "principal")
    arms: dict[str, dict[str, Any]] = {
        "plain": {},
        "margin": {"objective": margin},
        "principal": {"rule": rule},
        "measured": {"rule": {"name": "measured", "unseen": 0.0}},  # all samples train: the same local models
    }
    warm = []
    if warm_rounds:
        start = shared | {"partition": "iid", "rounds": warm_rounds, "client_losses": False}
        start |= {} if warm_lr is None else {"lr": warm_lr}
        warm = [
            Cell(
                label="warm", experiment=make_experiment(start | {"seed": s}), path=out / "warm" / f"seed{s}"
            )
            for s in seeds
        ]
    once = {"partition": "dirichlet", **shared, "rounds": 1, "decompose": 1}
    cells = []
    for seed in seeds:
        begin = {"weights": out / "warm" / f"seed{seed}" / "model.safetensors"} if warm_rounds else {}
        for alpha in alphas:
            for arm, change in arms.items():
                settings_of_run = {**once, **change, **begin, "alpha": alpha, "seed": seed}
                cells.append((f"{arm}-alpha{alpha:g}", make_experiment(settings_of_run)))
    title = f"Figure 2 on {short_name(cells[0][1].dataset)}: one round" + (
        f" after {warm_rounds} rounds of FedAvg on iid clients" if warm_rounds else ""
    )
    primary = next(iter(make_measures(cells[0][1])))
    return FigurePlan(
        warm,
        StudyPlan(
            name=title, command=command, baseline=f"plain-alpha{alphas[0]:g}", cells=cells, primary=primary
        ),
    )


def run_figure2(
    plan: FigurePlan, out: Path, *, resume: bool, jobs: int | None, progress: Callable[[Event], None]
) -> Figure2:
    """Run what is not finished; write figure2.json, figure2.md, figure2.png and figure2.svg."""

    cells = open_study(plan.study, out, resume=resume)
    if plan.warm:
        _all_of(run_grid(plan.warm, jobs=jobs, progress=progress))
    _all_of(run_grid(cells, jobs=jobs, progress=progress))
    first = plan.study.cells[0][1].model_dump(mode="json", exclude_none=True)
    hidden = {"alpha", "seed", "objective", "rule", "weights", "workers"}
    settings = {key: value for key, value in first.items() if key not in hidden}
    figure = Figure2(plan.study.name, plan.study.command, settings, [_point(cell) for cell in cells])
    write_atomically(out / "figure2.json", json.dumps(figure.to_json(), indent=1).encode())
    write_atomically(out / "figure2.md", figure.to_markdown().encode())
    draw_figure2(figure, out / "figure2")
    return figure


def _point(cell: Cell) -> Point:
    line = read_lines(cell.path, ROUNDS)[0]
    terms = [line["local_loss"], line["shift_loss"], line["aggregation_loss"], line["global_loss"]]
    finite = [term for term in terms if term is not None]
    if len(finite) < len(terms):
        raise FedLDError(f"'{cell.path}' diverged in its one round: take a smaller learning rate")
    local, shift, aggregation, total = finite
    return Point(
        arm=cell.label.split("-")[0],
        alpha=cell.experiment.alpha,
        seed=cell.experiment.seed,
        local=local,
        shift=shift,
        aggregation=aggregation,
        total=total,
    )


def _all_of(failed: Mapping[Path, str]) -> None:
    """Raise an error if a run failed: the figure needs every run."""
    for path, why in failed.items():
        raise FedLDError(f"run {path.name} failed: {why}")


matplotlib.use("Agg")

COLOURS = {"plain": "#555555", "margin": "#c23b3b", "principal": "#2f6db5", "measured": "#2a8a4a"}
NAMES = {"shift": "distribution shift loss", "aggregation": "aggregation loss"}
WIDE = 30  # largest over median value from which an axis is logarithmic away from 0
LABELS = {
    "plain": "naive",
    "margin": "with margin control",
    "principal": "with the principal rule",
    "measured": "with the measured rule",
}


def draw_figure2(figure2: Figure2, path: Path) -> None:
    """Write path.png and path.svg: mean over seeds, bands from the smallest to the largest."""
    with plt.rc_context({"svg.hashsalt": "fedld"}):
        figure, axes = plt.subplots(2, 2, figsize=(8.4, 6.4), sharex=True, layout="constrained")
        for row, absolute in enumerate((False, True)):
            for column, term in enumerate(CONTRASTS):
                _panel(axes[row][column], figure2, term, absolute)
        for ax in axes[1]:
            ax.set_xlabel("Dirichlet alpha (heterogeneity grows to the right)")
        seeds = len({point.seed for point in figure2.points})
        figure.suptitle(f"{figure2.title}\nmean and range over {seeds} seed(s)", fontsize=10)
        figure.savefig(path.with_suffix(".png"), dpi=300)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)


def _panel(ax: Axes, figure2: Figure2, term: str, absolute: bool) -> None:
    drawn: list[float] = [0.0]
    for arm in ("plain", *CONTRASTS[term]):
        values = np.array([figure2.values(arm, term, alpha) for alpha in figure2.alphas])
        values, colour = np.abs(values) if absolute else values, COLOURS[arm]
        drawn += values.flatten().tolist()
        style = "--" if arm == "plain" else "-"
        ax.plot(values.mean(1), style, marker="o", markersize=4, color=colour, label=LABELS[arm])
        ax.fill_between(
            range(len(values)), values.min(1), values.max(1), color=colour, alpha=0.15, linewidth=0
        )
    ax.axhline(0, color="0.6", linewidth=0.8)
    middle = float(np.median(np.abs(drawn)))
    if max(map(abs, drawn)) > WIDE * middle > 0:
        ax.set_yscale("symlog", linthresh=middle)
        ax.set_ylim(min(drawn) * 1.5 - 0.1 * middle, max(drawn) * 1.5 + 0.1 * middle)
    ax.set_xticks(range(len(figure2.alphas)), [f"{alpha:g}" for alpha in figure2.alphas])
    ax.set_title(f"{'|' if absolute else ''}{NAMES[term]}{'|' if absolute else ', signed'}", fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
