"""All checks in order, the evidence of runs for them, and the merged findings of several seeds."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from fedld.analysis.diagnosis import data_checks as data
from fedld.analysis.diagnosis import training_checks as training
from fedld.analysis.diagnosis.evidence import Evidence, Finding
from fedld.analysis.diagnosis.training_checks import ADVICE
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.errors import FedLDError
from fedld.records.reader import Run, by_label
from fedld.records.schema import Predictions

NUMBER = re.compile(r"(?<![\w.+\-])[+\-]?(?:\d+\.\d+(?!\w)|\d+(?=%))")
"""A measured number: a decimal fraction or a percentage. Whole numbers may be names: classes, clients."""


def merge_sentences(sentences: Sequence[str]) -> tuple[str, int]:
    """Merge sentences into the most common wording, with mean and deviation of numbers that differ.

    Args:
        sentences: what a check said of each run.

    Returns:
        The sentence, and how many of the sentences have its wording.

    >>> merge_sentences(["a costs 0.10 (5%)", "a costs 0.30 (5%)", "b costs 0.90 (5%)"])
    ('a costs 0.20 ± 0.14 (5%)', 2)
    """
    wordings = [NUMBER.sub("#", sentence) for sentence in sentences]
    common = max(dict.fromkeys(wordings), key=wordings.count)
    alike = [sentence for sentence, wording in zip(sentences, wordings, strict=True) if wording == common]
    columns = iter(zip(*(NUMBER.findall(sentence) for sentence in alike), strict=True))
    return NUMBER.sub(lambda _: _spread(next(columns)), alike[0]), len(alike)


def _spread(texts: Sequence[str]) -> str:
    """Write mean ± standard deviation of printed numbers; one number where they are equal."""
    if len(set(texts)) == 1:
        return texts[0]
    digits = max(1, *(len(text.partition(".")[2]) for text in texts))
    sign = "+" if any(text.startswith("+") for text in texts) else ""
    values = [float(text) for text in texts]
    return f"{fmean(values):{sign}.{digits}f} ± {stdev(values):.{digits}f}"


def merge_accounts(findings: Sequence[Finding], label: str) -> Finding:
    """Merge the accounts of the last round (`dominant_term`) of one method: means over its seeds."""
    numbers = [finding.numbers for finding in findings]
    count = len(findings)
    if count == 1:
        return findings[0]
    total, local, shift, aggregation = (
        _term(numbers, name) for name in ("total", "local", "shift", "aggregation")
    )
    means = {name: fmean(account[name] for account in numbers) for name in ADVICE}
    largest = max(means, key=lambda name: abs(means[name]))
    sentence = (
        f"{label}, round {numbers[0]['round']}, mean ± sd over {count} seeds: global loss {total} = local "
        f"{local} + shift {shift} + aggregation {aggregation}; {largest} is largest"
    )
    for name in ("shift", "aggregation"):
        below = sum(account[name] < 0 for account in numbers)
        if 0 < below < count:
            sentence += f"; {name} is below 0 in {below} of {count} seeds"
    first = findings[0]
    merged = {"round": numbers[0]["round"], "dominant": largest, "seeds": count, **means}
    return Finding(
        check=first.check,
        level=first.level,
        sentence=f"{sentence}.",
        numbers=merged,
        thresholds=first.thresholds,
        advice=ADVICE[largest],
    )


def _term(numbers: Sequence[Mapping[str, Any]], name: str) -> str:
    sign = "+" if name in ("shift", "aggregation") else ""
    values = [float(account[name]) for account in numbers]
    return f"{fmean(values):{sign}.3f} ± {stdev(values):.3f}"


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
    """Collect everything that a run directory recorded."""
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
    """Check that the file has a matrix with a row per class; it may be damaged."""
    if predictions is None:
        return False
    names, counts = predictions.get("classes"), predictions.get("confusion")
    return isinstance(names, list) and isinstance(counts, list) and len(names) == len(counts)


def rule_name(run: Run) -> str | None:
    """Name the aggregation rule of a run; None if its settings are damaged."""
    try:
        return make_method(make_experiment(run.config)).rule.name
    except FedLDError:
        return None


def diagnose_all(runs: Sequence[Run]) -> list[StudyFinding]:
    """Diagnose all runs: equal findings together, warnings first; the account of the loss by method."""
    seeds = {label: len(method_runs) for label, method_runs in by_label(runs).items()}
    findings: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    for run in runs:
        for finding in diagnose(evidence_of(run)):
            method_runs = run.label if finding.check == "dominant_term" else ""
            findings.setdefault((finding.level, finding.check, method_runs), []).append((run.label, finding))
    shared = [_merged(same, seeds) for same in findings.values()]
    return sorted(shared, key=lambda shared_finding: shared_finding.finding.level != "warning")


def _merged(same: Sequence[tuple[str, Finding]], seeds: Mapping[str, int]) -> StudyFinding:
    """Merge the findings that several runs have in common."""
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


CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    data.targets,
    data.label_skew,
    data.single_class,
    data.size_imbalance,
    data.features,
    data.absent,
    training.not_measured,
    training.diverged,
    data.nothing_learned,
    data.never_predicted,
    data.outliers,
    training.hidden,
    training.opposed_groups,
    training.conflict,
    training.step,
    training.measured_steps,
    training.silent_voters,
    training.stability,
    data.overruled,
    training.batchnorm,
    training.costs,
    training.clients,
    training.dominant_term,
)


def diagnose(evidence: Evidence) -> list[Finding]:
    """Run all checks; warnings come first.

    >>> [finding.check for finding in diagnose(Evidence(label_counts=[[90, 0], [0, 90]]))]
    ['label_skew', 'single_class']
    >>> diagnose(Evidence(label_counts=[[45, 45], [46, 44]]))
    []
    """
    findings = [finding for check in CHECKS for finding in check(evidence)]
    return sorted(findings, key=lambda finding: finding.level != "warning")
