"""The verdict: every check made once, in a federation's order of life; what was not measured stays unsaid."""

from collections.abc import Callable, Iterator

from fedld.analysis.diagnosis import labels as data
from fedld.analysis.diagnosis import losses, measured, predictions, sites, updates
from fedld.analysis.diagnosis.evidence import Evidence, Finding

CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    data.label_skew,
    data.single_class,
    data.size_imbalance,
    data.features,
    sites.absent,
    losses.not_measured,
    losses.diverged,
    predictions.nothing_learned,
    predictions.never_predicted,
    sites.outliers,
    updates.hidden,
    updates.opposed_groups,
    updates.conflict,
    updates.step,
    measured.measured_steps,
    measured.silent_voters,
    updates.stability,
    sites.overruled,
    updates.batchnorm,
    losses.costs,
    losses.clients,
    losses.dominant_term,
)


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, warnings first.

    >>> [finding.check for finding in diagnose(Evidence(label_counts=[[90, 0], [0, 90]]))]
    ['label_skew', 'single_class']
    >>> diagnose(Evidence(label_counts=[[45, 45], [46, 44]]))
    []
    """
    findings = [finding for check in CHECKS for finding in check(evidence)]
    return sorted(findings, key=lambda finding: finding.level != "warning")
