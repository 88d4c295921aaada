"""What the model predicts: nothing, or never some class."""

from collections.abc import Iterator

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, warning
from fedld.analysis.diagnosis.thresholds import limit
from fedld.tasks.measure import known


def nothing_learned(evidence: Evidence) -> Iterator[Finding]:
    """The global model is no better than guessing."""
    values = known([line.get("test", {}).get("balanced_accuracy") for line in evidence.rounds])
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
        "Check first that the plain mean learns with these settings; then the learning rate and the rule.",
    )


def never_predicted(evidence: Evidence) -> Iterator[Finding]:
    """Classes that the test set has and the final model predicts for no image."""
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
        "Accuracy hides this: compare balanced accuracy (--primary balanced_accuracy). Train longer, from "
        "pretrained weights, or with a loss that weighs classes by their counts.",
    )


def _held(evidence: Evidence, k: int) -> str:
    """Which clients hold the class, and how much of all it is."""
    held = None if evidence.label_counts is None else np.asarray(evidence.label_counts)
    if held is None or k >= held.shape[1]:
        return ""
    order = [int(i) for i in np.argsort(-held[:, k], kind="stable") if held[i, k]]
    sites = [f"{evidence.name(i)} ({int(held[i, k])})" for i in order]
    told = f"the sites that hold it are {listing(sites)}" if sites else "no site holds it"
    return f"; {told}, {held[:, k].sum() / max(held.sum(), 1):.0%} of all training images"
