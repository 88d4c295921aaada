"""What a run directory gives a diagnosis, and its findings put together for all methods of a study."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedld.analysis import Evidence, Finding, diagnose
from fedld.config.experiment import make_experiment
from fedld.config.resolve import make_method
from fedld.errors import FedLDError
from fedld.records.reader import Run, longest_run
from fedld.records.schema import Predictions


@dataclass(frozen=True)
class Shared:
    """A finding and the methods it holds for; the numbers in its sentence are the first one's."""

    finding: Finding
    labels: tuple[str, ...]


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


def diagnose_all(runs: Sequence[Run]) -> list[Shared]:
    """Findings of one run for each method, equal kinds together, warnings first."""
    labels = list(dict.fromkeys(run.label for run in runs))
    chosen = {label: longest_run([run for run in runs if run.label == label]) for label in labels}
    found: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for label in labels:
        for finding in diagnose(evidence_of(chosen[label])):
            found.setdefault((finding.level, finding.check), []).append((label, finding))
    shared = [Shared(same[0][1], tuple(label for label, _ in same)) for same in found.values()]
    return sorted(shared, key=lambda one: one.finding.level != "warning")
