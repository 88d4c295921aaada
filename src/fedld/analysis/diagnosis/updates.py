"""What the clients' updates and the training curve tell."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, warning
from fedld.analysis.diagnosis.thresholds import limit
from fedld.analysis.updates import UpdateMeasures, gram_report, split, update_measures
from fedld.records.flat import gram_clients
from fedld.records.schema import ConflictLine


def hidden(evidence: Evidence) -> Iterator[Finding]:
    """The server saw sums alone: clients took part, and nothing is recorded of a single update."""
    took_part = [line for line in evidence.client_rounds if "excluded" not in line]
    if took_part and not evidence.reports and not any("update_norm" in line for line in took_part):
        yield Finding(
            "hidden_updates",
            "info",
            "The server saw sums of updates alone: conflicts, outliers and the lengths of single updates are "
            "not known.",
            {},
            {},
            "",
        )


def opposed_groups(evidence: Evidence) -> Iterator[Finding]:
    """The clients fall into two groups that pull in opposite directions."""
    found = split(evidence.reports) if evidence.reports else None
    if found is None or found.between > limit("opposed_cosine"):
        return
    if found.within < limit("agreeing_cosine") or found.minority_weight < limit("minority_weight"):
        return
    votes = [_first_axis(report) for report in evidence.reports]
    one, other = listing(found.majority), listing(found.minority)
    yield warning(
        "opposed_groups",
        f"Clients are split into two opposed groups: {one} against {other} (mean cosine {found.between:.2f} "
        f"across, {found.minority_weight:.0%} of the samples on the smaller side).",
        {
            "majority": list(found.majority),
            "minority": list(found.minority),
            "between_cosine": found.between,
            "within_cosine": None if np.isnan(found.within) else found.within,
            "minority_weight": found.minority_weight,
            "first_axis_weight_for": float(np.median([v[0] for v in votes])),
            "first_axis_weight_against": float(np.median([v[1] for v in votes])),
        },
        ("opposed_cosine", "agreeing_cosine", "minority_weight"),
        "The first principal axis is this conflict and its votes cancel: compare the principal rule with the "
        "plain mean or consensus; if the groups' tasks truly differ, use personal layers (FedBN, FedPAC).",
    )


def conflict(evidence: Evidence) -> Iterator[Finding]:
    """Many pairs of updates point away from each other, or the mean update cancels."""
    if not evidence.reports:
        return
    measures = [_measures(report) for report in evidence.reports]
    rate = float(np.median([m.conflict_rate for m in measures]))
    cancellation = float(np.median([m.cancellation for m in measures]))
    apart, cancels = rate >= limit("conflict_rate"), cancellation < limit("cancellation")
    if not apart and not cancels:
        return
    pairs = f"{rate:.0%} of the pairs of clients point away from each other"
    length = f"{cancellation:.2f} times the squared length that unrelated updates would give it"
    sentence = (
        f"Updates cancel: the mean update has {length}, and {pairs}."
        if cancels
        else f"Updates pull apart: {pairs}; the mean update keeps its length all the same ({length})."
    )
    yield warning(
        "conflict",
        sentence,
        {
            "conflict_rate": rate,
            "cancellation": cancellation,
            "mean_cosine": float(np.median([m.mean_cosine for m in measures])),
            "b_dissimilarity": float(np.median([m.b_dissimilarity for m in measures])),
        },
        ("conflict_cosine", "conflict_rate", "cancellation"),
        _against_conflict(evidence, cancels),
    )


def _against_conflict(evidence: Evidence, cancels: bool) -> str:
    """Advice by what was measured: the clients' own verdict on other steps, where there is one."""
    if evidence.trials:
        return "The clients measured other steps in every round: see what they chose."
    if cancels:
        return (
            "What is left of a cancelled step may be too short or too long, and no formula knows: let the "
            "clients measure it (fedld-measured, or --rule measured around any method)."
        )
    return "Fewer local epochs, a smaller learning rate or SCAFFOLD keep clients closer together."


def step(evidence: Evidence) -> Iterator[Finding]:
    """The rule's step is much shorter than the plain average's, or turns away from it."""
    if not evidence.reports:
        return
    ratio = float(np.median([report["norm_ratio"] for report in evidence.reports]))
    cosine = float(np.median([report["cosine"] for report in evidence.reports]))
    if ratio >= limit("norm_ratio") and cosine >= limit("cosine_to_average"):
        return
    rule = f"The rule '{evidence.rule}'" if evidence.rule else "The aggregation rule"
    yield warning(
        "step",
        f"{rule} is fighting the clients: its step has {ratio:.2f} times the length of the plain average, "
        f"with a cosine of {cosine:.2f} to it.",
        {"norm_ratio": ratio, "cosine_to_average": cosine},
        ("norm_ratio", "cosine_to_average"),
        "Compare with the plain mean, or let the clients measure which step is best (--rule measured).",
    )


def stability(evidence: Evidence) -> Iterator[Finding]:
    """The principal rule stands where it is discontinuous."""
    if evidence.rule != "principal" or not evidence.reports:
        return
    margin = float(np.median([report["sign_margin"] for report in evidence.reports]))
    gap = float(np.median([report["eigen_gap"] for report in evidence.reports]))
    if margin >= limit("sign_margin") and gap >= limit("eigen_gap"):
        return
    yield warning(
        "stability",
        f"The principal rule stands near a jump (sign margin {margin:.1e}, eigen-gap {gap:.1e}): tiny "
        "changes of an update can change the step.",
        {"sign_margin": margin, "eigen_gap": gap},
        ("sign_margin", "eigen_gap"),
        "Use conflict = smooth, which is continuous, or keep fewer axes.",
    )


def batchnorm(evidence: Evidence) -> Iterator[Finding]:
    """BatchNorm statistics differ between clients."""
    values = [v for line in evidence.rounds if (v := line.get("buffer_disagreement")) is not None]
    if not values or (disagreement := float(np.median(values))) < limit("buffer_disagreement"):
        return
    yield warning(
        "batchnorm",
        f"BatchNorm statistics disagree: running means lie {disagreement:.2f} standard deviations apart.",
        {"buffer_disagreement": disagreement},
        ("buffer_disagreement",),
        "Their average fits no client: try personal BatchNorm (FedBN or buffers = local), or GroupNorm.",
    )


def _measures(line: ConflictLine) -> UpdateMeasures:
    names, weights = gram_clients(line)
    report = gram_report(line["gram"], weights, clients=names)
    return update_measures(report, tolerance=-limit("conflict_cosine"))


def _first_axis(line: ConflictLine) -> tuple[float, float]:
    """Weights for and against the first axis (0 and 0 if all updates are zero)."""
    sides: Sequence[Sequence[float]] = (line["weight_for"] or [0.0], line["weight_against"] or [0.0])
    return sides[0][0], sides[1][0]
