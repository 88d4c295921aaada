"""Checks of what clients hold and predict: labels, sites, predictions."""

from collections.abc import Iterator

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, limit, listing, skewed, warning
from fedld.analysis.heterogeneity import feature_distances, feature_shift
from fedld.analysis.sites import Participation
from fedld.records.schema import OutlierRecord
from fedld.tasks.measure import finite_values


def label_skew(evidence: Evidence) -> Iterator[Finding]:
    """Label distributions differ between clients."""
    labels = evidence.labels
    if labels is None or not skewed(labels):
        return
    farthest = np.unravel_index(np.nanargmax(labels.jensen_shannon), labels.jensen_shannon.shape)
    first, second = sorted(evidence.name(int(i)) for i in farthest)
    yield warning(
        "label_skew",
        f"Clients hold different {_what(evidence)}: their Jensen-Shannon distance is {labels.skew:.2f} "
        f"beyond chance (0 same, 1 disjoint), largest between {first} and {second}.",
        {
            "skew": labels.skew,
            "p_value": labels.p_value,
            "largest": float(np.nanmax(labels.jensen_shannon)),
            "clients": [first, second],
        },
        ("label_skew", "label_p_value"),
        advice="Expect a shift loss: try margin control or FedProx, and fewer local epochs.",
    )


def _what(evidence: Evidence) -> str:
    return f"targets ({listing(list(evidence.groups))})" if evidence.groups else "labels"


def targets(evidence: Evidence) -> Iterator[Finding]:
    """Report ranges of clients' targets, where samples have no class."""
    ranges: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys(name for summary in evidence.targets for name in summary):
        values = np.array([summary.get(name, np.nan) for summary in evidence.targets])
        if np.isfinite(values).sum() > 1:
            ranges[name] = int(np.nanargmin(values)), int(np.nanargmax(values))
    if not ranges:
        return
    sentences = [
        f"{name} from {evidence.targets[low][name]:.3g} ({evidence.name(low)}) to "
        f"{evidence.targets[high][name]:.3g} ({evidence.name(high)})"
        for name, (low, high) in ranges.items()
    ]
    yield Finding(
        check="targets",
        level="info",
        sentence=f"Targets over clients: {'; '.join(sentences)}.",
        numbers={name: [summary.get(name) for summary in evidence.targets] for name in ranges},
        thresholds={},
        advice="",
    )


def single_class(evidence: Evidence) -> Iterator[Finding]:
    """Check for clients with one class only, in a federation that has more."""
    if evidence.labels is None:
        return
    effective = evidence.labels.effective_classes
    names = [evidence.name(int(i)) for i in np.flatnonzero(effective <= limit("single_class"))]
    total = int(np.count_nonzero(np.asarray(evidence.label_counts).sum(axis=0)))
    if not names or total < 2:
        return
    yield warning(
        "single_class",
        f"{len(names)} of {len(effective)} clients hold practically one "
        f"{'group of targets' if evidence.groups else 'class'} ({listing(names)}).",
        {"clients": names, "effective_classes": [None if np.isnan(e) else float(e) for e in effective]},
        ("single_class",),
        advice="Such clients pull towards their class; they can form opposed groups, on which the principal "
        "rule "
        "shrinks the step: compare it with the plain mean or consensus.",
    )


def size_imbalance(evidence: Evidence) -> Iterator[Finding]:
    """Check whether a few clients hold most of the data."""
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
        advice="Look at results per client; uniform weights give small clients a voice, FedNova corrects "
        "for their "
        "smaller number of local steps.",
    )


def features(evidence: Evidence) -> Iterator[Finding]:
    """Check whether pictures look different at different clients."""
    if evidence.feature_means is None or evidence.feature_spreads is None or evidence.label_counts is None:
        return
    distances = feature_distances(evidence.feature_means, evidence.feature_spreads)
    shift = feature_shift(distances, np.asarray(evidence.label_counts).sum(axis=1))
    if shift < limit("feature_shift"):
        return
    farthest = int(np.nansum(distances, axis=1).argmax())
    yield warning(
        "feature_shift",
        f"{evidence.samples.capitalize()} look different between clients: mean features lie {shift:.2f} "
        f"spreads apart, and {evidence.name(farthest)} is farthest from the others.",
        {"feature_shift": shift, "client": evidence.name(farthest), "largest": float(np.nanmax(distances))},
        ("feature_shift",),
        advice="Try margin control against site shortcuts, personal BatchNorm (FedBN), or GroupNorm.",
    )


def absent(evidence: Evidence) -> Iterator[Finding]:
    """Check for sampled clients without a usable update."""
    absences = Participation(evidence.client_rounds).absences
    absences = [absence for absence in absences if len(absence.rounds) >= limit("absent_rounds")]
    if not absences:
        return
    rest = f" {len(absences) - 3} more are missing at times." if len(absences) > 3 else ""
    yield warning(
        "absent",
        " ".join(absence.sentence() for absence in absences[:3]) + rest,
        {
            absence.client: {
                "rounds": list(absence.rounds),
                "share": absence.share,
                "reasons": absence.reasons,
            }
            for absence in absences
        },
        ("absent_rounds",),
        advice="The result says nothing about data that were not there: bring these clients back and "
        "continue, or "
        "leave them out on purpose; for updates that are not finite, lower the learning rate.",
    )


def outliers(evidence: Evidence) -> Iterator[Finding]:
    """Check for outliers in the aggregation: updates far longer than the others', or against them."""
    outliers: dict[tuple[str, str], list[OutlierRecord]] = {}
    for line in evidence.reports:
        for outlier in line.get("outliers") or []:
            outliers.setdefault((outlier["client"], outlier["kind"]), []).append(outlier)
    rounds = max(len(evidence.reports), 1)
    lasting = {
        key: records for key, records in outliers.items() if len(records) / rounds >= limit("outlier_share")
    }
    if not lasting:
        return
    parts = [
        f"{client} {_stands_out(kind, float(np.median([outlier['value'] for outlier in records])))} "
        f"({len(records)} of {rounds} rounds)"
        for (client, kind), records in lasting.items()
    ]
    yield warning(
        "outliers",
        f"Updates stand out: {'; '.join(parts[:4])}.",
        {
            f"{client}, {kind}": [outlier["value"] for outlier in records]
            for (client, kind), records in lasting.items()
        },
        ("outlier_share",),
        advice="Check these clients' labels, normalisation and learning rate first; a robust rule (median, "
        "krum) "
        "keeps one of them from deciding alone.",
    )


def _stands_out(kind: str, value: float) -> str:
    if kind == "length":
        return f"is {value:.3g} times as long as the median"
    return f"opposes the others (median cosine {value:.2f})"


def overruled(evidence: Evidence) -> Iterator[Finding]:
    """Check for clients with updates that point against the server's step."""
    cosines: dict[str, list[float]] = {}
    for line in evidence.client_rounds:
        if line.get("cosine_to_aggregate") is not None:
            cosines.setdefault(str(line["client"]), []).append(float(line["cosine_to_aggregate"]))
    medians = {name: float(np.median(values)) for name, values in cosines.items()}
    names = sorted(
        (name for name, c in medians.items() if c < limit("client_cosine")), key=medians.__getitem__
    )
    if names:
        yield warning(
            "overruled",
            f"The global step goes against {listing(names)} (median cosine {medians[names[0]]:.2f}).",
            {name: medians[name] for name in names},
            ("client_cosine",),
            advice=(
                "Look at these clients' labels and images first; personal layers serve one that stays "
                "different."
            ),
        )


def nothing_learned(evidence: Evidence) -> Iterator[Finding]:
    """Check whether the global model is no better than guessing."""
    values = finite_values([line.get("test", {}).get("balanced_accuracy") for line in evidence.rounds])
    if not values or evidence.label_counts is None:
        return
    chance = 1 / max(int(np.count_nonzero(np.asarray(evidence.label_counts).sum(axis=0))), 1)
    last = float(np.mean(values[-5:]))
    if last > chance + limit("above_chance"):
        return
    yield warning(
        "nothing_learned",
        f"The global model guesses: balanced accuracy {last:.3f} in the last {len(values[-5:])} evaluations, "
        f"against {chance:.3f} by chance.",
        {"balanced_accuracy": last, "chance": chance},
        ("above_chance",),
        advice=(
            "Check first that the plain mean learns with these settings; then the learning rate and the rule."
        ),
    )


def never_predicted(evidence: Evidence) -> Iterator[Finding]:
    """Check for classes of the test set that the final model predicts for no image."""
    if evidence.predictions is None:
        return
    counts, names = np.asarray(evidence.predictions["confusion"]), evidence.predictions["classes"]
    columns = counts[:, : len(counts)].sum(axis=0)
    never = [int(k) for k in np.flatnonzero((counts.sum(axis=1) > 0) & (columns == 0))]
    if not never:
        return
    images = {str(names[k]): int(counts[k].sum()) for k in never}
    if len(never) == 1:
        (name,) = images
        sentence = (
            f"Class {name} is never predicted: none of {images[name]} test images{_held(evidence, never[0])}."
        )
    else:
        sentence = f"{len(never)} of {len(names)} classes are never predicted: {listing(list(images))}."
    yield warning(
        "never_predicted",
        sentence,
        {"test_images": images},
        (),
        advice="Accuracy hides this: compare balanced accuracy (--primary balanced_accuracy). Train longer, "
        "from "
        "pretrained weights, or with a loss that weighs classes by their counts.",
    )


def _held(evidence: Evidence, k: int) -> str:
    """Name the clients that hold a class, and its share of all samples."""
    counts = None if evidence.label_counts is None else np.asarray(evidence.label_counts)
    if counts is None or k >= counts.shape[1]:
        return ""
    order = [int(i) for i in np.argsort(-counts[:, k], kind="stable") if counts[i, k]]
    sites = [f"{evidence.name(i)} ({int(counts[i, k])})" for i in order]
    sentence = f"the sites that hold it are {listing(sites)}" if sites else "no site holds it"
    return f"; {sentence}, {counts[:, k].sum() / max(counts.sum(), 1):.0%} of all training images"
