"""What the clients measured of other steps than the one plain averaging takes (rule `measured`)."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, warning
from fedld.analysis.diagnosis.thresholds import limit
from fedld.analysis.updates import chosen_step


def measured_steps(evidence: Evidence) -> Iterator[Finding]:
    """Which candidate the clients chose, how often, and what it gained over the plain average."""
    counted = [trial for trial in evidence.trials if trial["fallback"] is None]
    if not counted:
        return
    chosen = Counter(chosen_step(trial) for trial in counted)
    (best, times), other = chosen.most_common(1)[0], sum(trial["chosen"] != 0 for trial in counted)
    gain = float(np.mean([trial["gain"] for trial in counted]))
    lengths = [trial["lengths"][trial["chosen"]] for trial in counted]
    yield Finding(
        "measured_steps",
        "info",
        f"In {other} of {len(counted)} rounds the clients measured another step as better than the plain "
        f"average; most often {best} ({times} of {len(counted)}); mean gain in loss {gain:.4f} per round.",
        {"chosen": dict(chosen), "mean_gain": gain, "median_length": float(np.median(lengths))},
        {"measured_gain": limit("measured_gain")},
        _advice(gain, float(np.median(lengths))),
    )


def silent_voters(evidence: Evidence) -> Iterator[Finding]:
    """Clients whose measurements could not count, and rounds that fell back to the average."""
    reasons: dict[str, str] = {}
    for trial in evidence.trials:
        reasons |= trial["left_out"]
    fallbacks = sum(trial["fallback"] is not None for trial in evidence.trials)
    if not reasons and not fallbacks:
        return
    who = listing([f"{name} ({why})" for name, why in reasons.items()])
    rounds = f" In {fallbacks} rounds too few were left and the plain average was taken." if fallbacks else ""
    yield warning(
        "silent_voters",
        f"Measurements of {who} do not count.{rounds}",
        {"left_out": reasons, "fallbacks": fallbacks},
        (),
        "Look at these clients' logs; a client that reports what cannot be should not vote (vote = median).",
    )


def _advice(gain: float, length: float) -> str:
    if gain < limit("measured_gain"):
        return "Measuring gains little here: FedAvg takes about the same steps and saves the exchange."
    if length > 1:
        return "The plain average's steps are too short here: keep measuring, or raise the learning rate."
    if length < 1:
        return "The plain average's steps are too long here: keep measuring, or lower the learning rate."
    return "Length is right and direction is not: keep measuring."
