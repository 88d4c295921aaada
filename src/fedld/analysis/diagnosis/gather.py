"""What a run directory gives a diagnosis, and its findings put together for all methods of a study."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedld.analysis import Evidence, Finding, diagnose
from fedld.analysis.diagnosis.merge import merge_accounts, merge_sentences
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.errors import FedLDError
from fedld.records.reader import Run, by_label
from fedld.records.schema import Predictions


@dataclass(frozen=True, kw_only=True)
class StudyFinding:
    """A finding over all runs of a study.

    finding   its numbers are means over the runs that it holds for
    holds     method: in how many of its seeds, and of how many
    methods   number of methods in the study
    """

    finding: Finding
    holds: Mapping[str, tuple[int, int]]
    methods: int

    @property
    def where(self) -> str:
        """Of which methods it holds and in how many seeds; empty if of all, with one seed each."""
        everywhere = len(self.holds) == self.methods and all(k == n for k, n in self.holds.values())
        seeds = max(n for _, n in self.holds.values())
        if everywhere:
            return (
                ""
                if seeds == 1
                else f"all methods, all {seeds} seeds"
                if self.methods > 1
                else f"all {seeds} seeds"
            )
        if seeds == 1:
            return ", ".join(self.holds)
        return ", ".join(f"{label}: {k} of {n} seeds" for label, (k, n) in self.holds.items())


def evidence_of(run: Run) -> Evidence:
    """Everything a run directory recorded."""
    counts: dict[int, Any] = {line["index"]: line.get("label_counts") for line in run.clients.lines}
    names = run.client_names
    complete = bool(names) and all(counts.get(i) for i in names)
    return Evidence(
        clients=list(names.values()),
        label_counts=[counts[i] for i in names] if complete else None,
        rounds=run.rounds.lines,
        client_rounds=run.clients.lines,
        reports=run.conflict.lines,
        cross_losses=run.cross_loss.lines,
        predictions=run.predictions if _sound(run.predictions) else None,
        rule=rule_name(run),
    )


def _sound(predictions: Predictions | None) -> bool:
    """Whether the file has a matrix with a row per class; it may be damaged."""
    if predictions is None:
        return False
    names, counts = predictions.get("classes"), predictions.get("confusion")
    return isinstance(names, list) and isinstance(counts, list) and len(names) == len(counts)


def rule_name(run: Run) -> str | None:
    """Aggregation rule of a run; None if its settings are damaged."""
    try:
        return make_method(make_experiment(run.config)).rule.name
    except FedLDError:
        return None


def diagnose_all(runs: Sequence[Run]) -> list[StudyFinding]:
    """Findings of all runs, equal kinds together, warnings first; the account of the loss by method."""
    seeds = {label: len(own) for label, own in by_label(runs).items()}
    found: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    for run in runs:
        for finding in diagnose(evidence_of(run)):
            own = run.label if finding.check == "dominant_term" else ""
            found.setdefault((finding.level, finding.check, own), []).append((run.label, finding))
    shared = [_merged(same, seeds) for same in found.values()]
    return sorted(shared, key=lambda one: one.finding.level != "warning")


def _merged(same: Sequence[tuple[str, Finding]], seeds: Mapping[str, int]) -> StudyFinding:
    """One finding of those that several runs have in common."""
    labels, findings = [label for label, _ in same], [finding for _, finding in same]
    holds = {label: (labels.count(label), seeds[label]) for label in dict.fromkeys(labels)}
    first = findings[0]
    if first.check == "dominant_term":
        return StudyFinding(finding=merge_accounts(findings, labels[0]), holds=holds, methods=len(seeds))
    sentence, alike = merge_sentences([finding.sentence for finding in findings])
    if alike < len(findings):
        sentence += (
            f" (So worded in {alike} of {len(findings)} runs; the others name other clients or causes.)"
        )
    return StudyFinding(finding=replace(first, sentence=sentence), holds=holds, methods=len(seeds))
