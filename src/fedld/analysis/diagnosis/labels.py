"""What the data alone tell, before any training."""

from collections.abc import Iterator

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, skewed, warning
from fedld.analysis.diagnosis.thresholds import limit
from fedld.analysis.heterogeneity import feature_distances, feature_shift


def label_skew(evidence: Evidence) -> Iterator[Finding]:
    """Label distributions differ between clients."""
    labels = evidence.labels
    if labels is None or not skewed(labels):
        return
    farthest = np.unravel_index(np.nanargmax(labels.jensen_shannon), labels.jensen_shannon.shape)
    first, second = sorted(evidence.name(int(i)) for i in farthest)
    yield warning(
        "label_skew",
        f"Clients hold different labels: their Jensen-Shannon distance is {labels.skew:.2f} beyond chance "
        f"(0 same, 1 disjoint), largest between {first} and {second}.",
        {
            "skew": labels.skew,
            "p_value": labels.p_value,
            "largest": float(np.nanmax(labels.jensen_shannon)),
            "clients": [first, second],
        },
        ("label_skew", "label_p_value"),
        "Expect a shift loss: try margin control or FedProx, and fewer local epochs.",
    )


def single_class(evidence: Evidence) -> Iterator[Finding]:
    """Clients that hold one class only, in a federation that has more."""
    if evidence.labels is None:
        return
    effective = evidence.labels.effective_classes
    names = [evidence.name(int(i)) for i in np.flatnonzero(effective <= limit("single_class"))]
    total = int(np.count_nonzero(np.asarray(evidence.label_counts).sum(axis=0)))
    if not names or total < 2:
        return
    yield warning(
        "single_class",
        f"{len(names)} of {len(effective)} clients hold practically one class ({listing(names)}).",
        {"clients": names, "effective_classes": [None if np.isnan(e) else float(e) for e in effective]},
        ("single_class",),
        "Such clients pull towards their class; they can form opposed groups, on which the principal rule "
        "shrinks the step: compare it with the plain mean or consensus.",
    )


def size_imbalance(evidence: Evidence) -> Iterator[Finding]:
    """A few clients hold most of the data."""
    labels = evidence.labels
    if labels is None or labels.size_imbalance < limit("size_imbalance"):
        return
    sizes = np.asarray(evidence.label_counts, dtype=np.float64).sum(axis=1)
    largest = int(sizes.argmax())
    yield warning(
        "size_imbalance",
        f"Sizes are unequal: {evidence.name(largest)} holds {sizes[largest] / sizes.sum():.0%} of all; "
        f"the {len(sizes)} clients count like {labels.effective_clients:.1f} of equal size.",
        {"size_imbalance": labels.size_imbalance, "effective_clients": labels.effective_clients},
        ("size_imbalance",),
        "Look at results per client; uniform weights give small clients a voice, FedNova corrects for their "
        "smaller number of local steps.",
    )


def features(evidence: Evidence) -> Iterator[Finding]:
    """Pictures look different at different clients."""
    if evidence.feature_means is None or evidence.feature_spreads is None or evidence.label_counts is None:
        return
    distances = feature_distances(evidence.feature_means, evidence.feature_spreads)
    shift = feature_shift(distances, np.asarray(evidence.label_counts).sum(axis=1))
    if shift < limit("feature_shift"):
        return
    farthest = int(np.nansum(distances, axis=1).argmax())
    yield warning(
        "feature_shift",
        f"Images look different between clients: mean features lie {shift:.2f} spreads apart, and "
        f"{evidence.name(farthest)} is farthest from the others.",
        {"feature_shift": shift, "client": evidence.name(farthest), "largest": float(np.nanmax(distances))},
        ("feature_shift",),
        "Try margin control against site shortcuts, personal BatchNorm (FedBN), or GroupNorm.",
    )
