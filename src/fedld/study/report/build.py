"""What goes on the page: groups of comparable runs, and for each its verdict, charts and tables."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedld.errors import FedLDError
from fedld.study.evidence import Shared, diagnose_all
from fedld.study.report.chart import Chart, looks
from fedld.study.report.clients import fairness_chart, labels_chart
from fedld.study.report.comparison import difference_chart, explanation_chart
from fedld.study.report.contributions import contributions_chart
from fedld.study.report.curves import by_label, measure_chart, step_chart, traffic_chart
from fedld.study.report.matrices import cosine_chart, cross_loss_chart
from fedld.study.report.quality import calibration_chart, confusion_chart
from fedld.study.report.spectrum import spectrum_chart
from fedld.study.report.tables import (
    Table,
    comparison_table,
    cost_table,
    environment_table,
    paper_table,
    settings_table,
)
from fedld.study.report.terms import terms_chart
from fedld.study.runs import Run, Study, clean
from fedld.study.verdict import Verdict, judge

TOP = (400, 250)  # the charts under the verdict
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """A part that cannot be shown, and why."""

    title: str
    why: str


Block = Chart | Table | Missing
T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """A heading with charts and tables."""

    key: str
    title: str
    blocks: list[Block]


@dataclass(frozen=True)
class Group:
    """Runs on the same data with the same model, never averaged with others."""

    key: str
    title: str
    runs: list[Run]
    verdict: Verdict | None
    findings: list[Shared] | Missing
    top: list[Block]
    sections: list[Section]

    @property
    def labels(self) -> list[str]:
        """The methods."""
        return list(by_label(self.runs))

    def charts(self) -> Iterator[Chart]:
        """All charts, each once."""
        for block in [*self.top, *(block for section in self.sections for block in section.blocks)]:
            if isinstance(block, Chart):
                yield block


def build(study: Study) -> list[Group]:
    """One group for every setting."""
    settings: dict[str, list[Run]] = {}
    for run in study.runs:
        settings.setdefault(run.setting, []).append(run)
    titles = [setting_title(runs[0]) for runs in settings.values()]
    return [
        _group(
            f"group-{k + 1}",
            titles[k] if titles.count(titles[k]) == 1 else f"{titles[k]} ({k + 1})",
            runs,
            study,
        )
        for k, runs in enumerate(settings.values())
    ]


def setting_title(run: Run) -> str:
    """Data and model in a few words."""
    c = run.config
    parts = [str(c.get("dataset", "unknown data"))]
    if c.get("split") is not None:
        parts.append(f"split {c['split']}")
    if c.get("clients") is not None and c.get("split") is None:
        parts.append(f"{c['clients']} clients")
    if str(c.get("partition", "")).startswith("dirichlet"):
        parts.append(f"alpha {c.get('alpha')}")
    return clean(", ".join([*parts, str(c.get("model", "unknown model")), f"{c.get('rounds', '?')} rounds"]))


def _group(key: str, title: str, runs: list[Run], study: Study) -> Group:
    styles = looks(list(by_label(runs)))
    verdict = judge(runs, study.baseline)
    needs_rounds = "rounds.jsonl holds no measurement of it"
    needs_terms = "no round was decomposed: run with --decompose 1"
    needs_labels = "clients.jsonl holds no label counts"
    needs_gram = "conflict.jsonl holds no Gram matrix"
    needs_predictions = "predictions.json is missing: it is written when a run ends"
    top: list[Block] = []
    if verdict is not None:
        top.append(_part("Difference", "needs two methods", lambda: difference_chart(verdict, styles)))
    top.append(_part("Accuracy", needs_rounds, lambda: measure_chart(runs, "accuracy", styles, TOP)))
    if verdict is not None and verdict.rival is not None:
        top.append(_part("Which loss term explains it", needs_terms, lambda: _explain(verdict)))
    sections = [
        Section("comparison", "Comparison", [
            comparison_table(runs, verdict, styles), paper_table(runs),
        ]),
        Section("curves", "AUROC and loss", [
            _part("AUROC", needs_rounds, lambda: measure_chart(runs, "auroc", styles)),
            _part("Loss", needs_rounds, lambda: measure_chart(runs, "loss", styles)),
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
        ]),
        Section("clients", "Clients", [
            _part("Labels of every client", needs_labels, lambda: labels_chart(runs)),
            _part("Accuracy of every client", needs_rounds, lambda: fairness_chart(runs, styles)),
        ]),
        Section("quality", "Errors and calibration", [
            _part("Confusion matrix", needs_predictions, lambda: confusion_chart(runs)),
            _part("Calibration", needs_predictions, lambda: calibration_chart(runs, styles)),
        ]),
        Section("cost", "Communication and time", [
            cost_table(runs),
            _part("Accuracy against communication", needs_rounds, lambda: traffic_chart(runs, styles)),
        ]),
        Section("settings", "Settings", [settings_table(runs), environment_table(runs)]),
    ]  # fmt: skip
    findings = _part("Diagnosis", "", lambda: diagnose_all(runs))
    return Group(key, title, runs, verdict, findings, top, _without_empty(sections))


def _explain(verdict: Verdict) -> Chart | None:
    if verdict.explanation is None or verdict.rival is None:
        return None
    return explanation_chart(verdict.winner.label, verdict.rival, verdict.explanation)


def _part(title: str, why: str, make: Callable[[], T | None]) -> T | Missing:
    """A chart, or what it lacks; damaged records must not cost the reader the rest of the page."""
    try:
        made = make()
        return Missing(title, why) if made is None else made
    except (ArithmeticError, AttributeError, FedLDError, LookupError, TypeError, ValueError) as error:
        log.debug("cannot draw %s", title, exc_info=True)
        return Missing(title, f"its records are damaged ({type(error).__name__}: {clean(error)})")


def _without_empty(sections: Sequence[Section]) -> list[Section]:
    kept = [Section(s.key, s.title, [b for b in s.blocks if not _is_empty(b)]) for s in sections]
    return [section for section in kept if section.blocks]


def _is_empty(block: Block) -> bool:
    return isinstance(block, Table) and not block.rows
