"""All checks in order: data, training, updates, losses. Checks without data are skipped."""

from collections.abc import Callable, Iterator

from fedld.analysis.diagnosis import data_checks as data
from fedld.analysis.diagnosis import training_checks as training
from fedld.analysis.diagnosis.evidence import Evidence, Finding

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
    """All findings, warnings first.

    >>> [finding.check for finding in diagnose(Evidence(label_counts=[[90, 0], [0, 90]]))]
    ['label_skew', 'single_class']
    >>> diagnose(Evidence(label_counts=[[45, 45], [46, 44]]))
    []
    """
    findings = [finding for check in CHECKS for finding in check(evidence)]
    return sorted(findings, key=lambda finding: finding.level != "warning")
