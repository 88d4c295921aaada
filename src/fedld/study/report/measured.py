"""Under the rule `measured`: which step the clients chose in every round, and what it gained."""

from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from fedld.analysis.updates import chosen_step
from fedld.records.reader import Run, by_label, longest_run
from fedld.records.schema import TrialRecord
from fedld.study.report.chart import Chart, Look, legend, settle
from fedld.study.report.style import MUTED, SURFACE, drawing, new_figure


def measured_chart(runs: Sequence[Run], styles: Mapping[str, Look]) -> Chart | None:
    """The chosen candidate of every round and its measured gain over the plain average."""
    found: dict[str, list[tuple[int, TrialRecord]]] = {}
    for label, own in by_label(runs).items():
        lines = longest_run(own).conflict.lines
        trials = [(line["round"], trial) for line in lines if (trial := line.get("trial"))]
        if trials:
            found[label] = trials
    if not found:
        return None
    order = sorted({_key(trial) for trials in found.values() for _, trial in trials})
    with drawing():
        figure = new_figure(1140, 120 + max(160, 24 * len(order)))
        left, right = figure.subplots(1, 2)
        for k, (label, trials) in enumerate(found.items()):
            rounds, look = [r for r, _ in trials], styles[label]
            shift = 0.12 * (k - (len(found) - 1) / 2)
            heights = [order.index(_key(trial)) + shift for _, trial in trials]
            (dots,) = left.plot(
                rounds, heights, "o", color=look.colour, markersize=8, markeredgecolor=SURFACE
            )
            (line,) = right.plot(rounds, [trial["gain"] for _, trial in trials], marker="o", **look.plot)
            for part in (dots, line):
                part.set_gid(f"part-series-{look.slot}")
        left.set_yticks(range(len(order)), [name for _, _, name in order])
        left.set_ylim(-0.6, len(order) - 0.4)
        left.set_title("Step that was measured as best")
        right.set_title("Measured gain in loss over the plain average")
        right.axhline(0, color=MUTED, linewidth=1, zorder=0)
        for ax in (left, right):
            ax.set_xlabel("round")
            ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        settle(figure)
    said = [
        f"{label}: another step than the average in {sum(t['chosen'] != 0 for _, t in trials)} of "
        f"{len(trials)} rounds"
        for label, trials in found.items()
    ]
    return Chart(
        "measured-steps",
        "Steps that the clients measured",
        "Lengths are multiples of the rule's own step. Where the plain average wins, nothing was gained.",
        "; ".join(said) + ".",
        figure,
        ("method", "round", "rule", "length", "gain", "fallback"),
        [
            (label, r, t["rules"][t["chosen"]], t["lengths"][t["chosen"]], t["gain"], t["fallback"])
            for label, trials in found.items()
            for r, t in trials
        ],
        legend=legend(found, styles),
        wide=True,
    )


def _key(trial: TrialRecord) -> tuple[str, float, str]:
    """Order of the candidates: by rule, then by length; the plain average first."""
    if not trial["chosen"]:
        return "", 1.0, "plain average"
    rule, length = trial["rules"][trial["chosen"]], float(trial["lengths"][trial["chosen"]])
    return rule, length, chosen_step(trial).replace(" at ", " × ").removesuffix(" times its length")
