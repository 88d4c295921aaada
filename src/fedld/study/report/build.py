"""What goes on the page: groups of comparable runs, and for each its verdict, charts and tables."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fedld.analysis.diagnosis.gather import StudyFinding, diagnose_all
from fedld.errors import FedLDError
from fedld.records.reader import Run, StudyRecords, by_label, clean, number
from fedld.study.comparison import Comparison, compare_runs
from fedld.study.report.cases import case_means_chart, case_means_table, overlay_chart
from fedld.study.report.chart import Chart, Look, looks
from fedld.study.report.clients import fairness_chart, labels_chart, participation_chart
from fedld.study.report.conflict import cosine_chart, cross_loss_chart, measured_chart, spectrum_chart
from fedld.study.report.curves import (
    curves,
    difference_chart,
    explanation_chart,
    measure_chart,
    step_chart,
    traffic_chart,
)
from fedld.study.report.decomposition import contributions_chart, terms_chart
from fedld.study.report.quality import calibration_chart, confusion_chart, survival_chart, values_chart
from fedld.study.report.tables import (
    PageTable,
    comparison_table,
    cost_table,
    environment_table,
    settings_table,
    sites_table,
    target_table,
)

TOP = (400, 250)  # the charts under the verdict
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """A part that cannot be shown, and why."""

    title: str
    why: str


PagePart = Chart | PageTable | Missing
T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """A heading with charts and tables."""

    key: str
    title: str
    blocks: list[PagePart]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs on the same data with the same model, never averaged with others."""

    key: str
    title: str
    runs: list[Run]
    comparison: Comparison
    findings: list[StudyFinding] | Missing
    top: list[PagePart]
    sections: list[Section]

    @property
    def labels(self) -> list[str]:
        """The methods."""
        return list(by_label(self.runs))

    def charts(self) -> Iterator[Chart]:
        """Iterate over all charts, each once."""
        for block in [*self.top, *(block for section in self.sections for block in section.blocks)]:
            if isinstance(block, Chart):
                yield block


MakeTable = Callable[[Sequence[Run]], PageTable]


def build(study: StudyRecords, tables: Sequence[MakeTable] = ()) -> list[Group]:
    """Make one group for every setting.

    Args:
        study: the runs.
        tables: makers of further tables, which stand beside the comparison: numbers of other sources.
    """
    groups = []
    for k, (comparison, runs) in enumerate(compare_groups(study)):
        further = [make(runs) for make in tables]
        groups.append(_group(f"group-{k + 1}", comparison, runs, further))
    return groups


def compare_groups(study: StudyRecords) -> list[tuple[Comparison, list[Run]]]:
    """Compare the runs of every setting; gives each comparison with all its runs, finished or not."""
    settings: dict[str, list[Run]] = {}
    for run in study.runs:
        settings.setdefault(run.setting, []).append(run)
    titles = [setting_title(runs[0]) for runs in settings.values()]
    names = [t if titles.count(t) == 1 else f"{t} ({k + 1})" for k, t in enumerate(titles)]
    return [
        (compare_runs(name, runs, study.baseline, study.primary, target=study.target), runs)
        for name, runs in zip(names, settings.values(), strict=True)
    ]


def setting_title(run: Run) -> str:
    """Describe data and model in a few words."""
    c = run.config
    parts = [str(c.get("dataset", "unknown data"))]
    if c.get("split") is not None:
        parts.append(f"split {c['split']}")
    # The records know how many clients there were; the setting does not where the data name their sites.
    counted = number(run.summary.get("clients")) if run.summary else 0
    count = int(counted) if counted > 0 else len(run.client_names) or c.get("clients")
    if count is not None:
        parts.append(f"{count} client{'s' if count != 1 else ''}")
    if str(c.get("partition", "")).startswith("dirichlet"):
        parts.append(f"alpha {c.get('alpha')}")
    return clean(", ".join([*parts, str(c.get("model", "unknown model")), f"{c.get('rounds', '?')} rounds"]))


def _group(key: str, comparison: Comparison, runs: list[Run], further: Sequence[PageTable]) -> Group:
    styles = looks(list(by_label(runs)))
    curve = comparison.primary_measure
    others = [measure for measure in curves(runs) if measure.name != curve.name]
    needs_rounds = "rounds.jsonl holds no measurement of it"
    needs_terms = "no round was decomposed: run with --decompose 1"
    needs_labels = "clients.jsonl holds no label counts"
    needs_gram = "conflict.jsonl holds no Gram matrix"
    classified = all(run.task == "classification" for run in runs)
    needs_predictions = "predictions.json is missing: it is written when a run ends"
    top: list[PagePart] = []
    absence = _part("Participation", "", lambda: participation_chart(runs))
    if isinstance(absence, Chart):
        top.append(absence)
    if len(comparison.ranked) > 1:
        top.append(_part("Difference", "needs two methods", lambda: difference_chart(comparison, styles)))
    top.append(_part(curve.title, needs_rounds, lambda: measure_chart(runs, curve, styles, TOP)))
    if comparison.rival is not None:
        top.append(_part("Which loss term explains it", needs_terms, lambda: _explain(comparison)))
    sections = [
        Section("comparison", "Comparison", [
            comparison_table(comparison, styles), *further,
        ]),
        Section("cases", "Cases", _cases(comparison, runs, styles)),
        Section("curves", "Other measures over rounds", [
            _part(measure.title, needs_rounds, partial(measure_chart, runs, measure, styles))
            for measure in others
        ]),
        Section("decomposition", "Loss decomposition", [
            _part("Loss decomposition over rounds", needs_terms, lambda: terms_chart(runs)),
            _part("Cross loss", needs_terms, lambda: cross_loss_chart(runs)),
            _part("Clients behind the terms", needs_terms, lambda: contributions_chart(runs, styles)),
        ]),
        Section("conflict", "Update conflict", [
            _part("Cosine between clients", needs_gram, lambda: cosine_chart(runs)),
            _part("Principal spectrum", needs_gram, lambda: spectrum_chart(runs)),
            _part("Server step", needs_rounds, lambda: step_chart(runs, styles)),
            *filter(_is_chart, [_part("Steps", "", lambda: measured_chart(runs, styles))]),
        ]),
        Section("clients", "Clients", [
            _part("Labels of every client", needs_labels, lambda: labels_chart(runs)),
            _part(f"{curve.title} of every client", needs_rounds, lambda: fairness_chart(runs, styles)),
            *filter(_is_table, [_part("Sites", "", lambda: sites_table(runs))]),
        ]),
        Section("quality", "Errors and calibration", [
            _part("Confusion matrix", needs_predictions, lambda: confusion_chart(runs)),
            _part("Calibration", needs_predictions, lambda: calibration_chart(runs, styles)),
        ] if classified else _outcomes(runs, styles)),
        Section("cost", "Communication and time", [
            cost_table(runs),
            *filter(_is_table, [_part("Cost to a target", "", lambda: target_table(comparison))]),
            _part(f"{curve.title} against communication", needs_rounds, lambda: traffic_chart(runs, styles)),
        ]),
        Section("settings", "Settings", [settings_table(runs), environment_table(runs)]),
    ]  # fmt: skip
    findings = _part("Diagnosis", "", lambda: diagnose_all(runs))
    return Group(
        key=key,
        title=comparison.title,
        runs=runs,
        comparison=comparison,
        findings=findings,
        top=top,
        sections=_without_empty(sections),
    )


def _outcomes(runs: list[Run], styles: Mapping[str, Look]) -> list[PagePart]:
    """Make the charts of predicted against observed outcomes, for tasks without classes."""
    needs_end = "predictions.csv is missing: it is written when a run ends with a global model"
    if all(run.task.startswith("survival") for run in runs):
        return [_part("Survival by predicted risk", needs_end, lambda: survival_chart(runs))]
    if all(run.task.startswith("regression") for run in runs):
        return [_part("Calibration", needs_end, lambda: values_chart(runs, styles))]
    return []


def _cases(comparison: Comparison, runs: list[Run], styles: Mapping[str, Look]) -> list[PagePart]:
    """Make outlines of the best method and of the baseline on pictures, and means over every site's cases."""
    if any(run.task != "segmentation" for run in runs):
        return []
    labels = {"cases": comparison.winner.label} if comparison.winner else {}
    if comparison.baseline not in labels.values():
        labels["cases-baseline"] = comparison.baseline
    needs_end = "cases.npz is missing: it is written when a run ends with a global model"
    overlays = [
        _part(f"Cases of {label}", needs_end, partial(overlay_chart, name, label, runs))
        for name, label in labels.items()
    ]
    means = _part("Dice at every site", "no run has ended", lambda: case_means_chart(runs, styles))
    table = _part("Every site's own test pictures", "no run has ended", lambda: case_means_table(runs))
    return [*overlays, means, table]


def _explain(comparison: Comparison) -> Chart | None:
    explanation = comparison.explanation
    if explanation is None or comparison.rival is None or comparison.winner is None:
        return None
    return explanation_chart(comparison.winner.label, comparison.rival, explanation)


def _part(title: str, why: str, make: Callable[[], T | None]) -> T | Missing:
    """Make a chart or name what it lacks; damaged records leave the rest of the page intact."""
    try:
        made = make()
        return Missing(title, why) if made is None else made
    except (ArithmeticError, AttributeError, FedLDError, LookupError, TypeError, ValueError) as error:
        log.debug("cannot draw %s", title, exc_info=True)
        return Missing(title, f"its records are damaged ({type(error).__name__}: {clean(error)})")


def _without_empty(sections: Sequence[Section]) -> list[Section]:
    kept = [Section(s.key, s.title, [b for b in s.blocks if not _is_empty(b)]) for s in sections]
    return [section for section in kept if section.blocks]


def _is_chart(block: PagePart) -> bool:
    """Select the charts among optional parts, which are left out where they cannot be made."""
    return isinstance(block, Chart)


def _is_table(block: PagePart) -> bool:
    """Select the tables among optional parts."""
    return isinstance(block, PageTable)


def _is_empty(block: PagePart) -> bool:
    return isinstance(block, PageTable) and not block.rows
