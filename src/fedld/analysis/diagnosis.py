"""The verdict: every rule asked once, in a federation's order of life; what was not measured stays unsaid."""

from collections.abc import Callable, Iterator

from fedld.analysis import diagnose_data as data
from fedld.analysis import diagnose_losses as losses
from fedld.analysis import diagnose_updates as updates
from fedld.analysis.evidence import Evidence, Finding

RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    data.label_skew,
    data.single_class,
    data.size_imbalance,
    data.features,
    updates.excluded,
    losses.diverged,
    updates.nothing_learned,
    updates.opposed_groups,
    updates.conflict,
    updates.step,
    updates.stability,
    updates.overruled,
    updates.batchnorm,
    losses.costs,
    losses.clients,
    losses.dominant_term,
)


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, warnings first.

    >>> [finding.rule for finding in diagnose(Evidence(label_counts=[[90, 0], [0, 90]]))]
    ['label_skew', 'single_class']
    >>> diagnose(Evidence(label_counts=[[45, 45], [46, 44]]))
    []
    """
    findings = [finding for rule in RULES for finding in rule(evidence)]
    return sorted(findings, key=lambda finding: finding.level != "warning")
