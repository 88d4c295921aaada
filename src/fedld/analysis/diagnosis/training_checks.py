"""Checks of what training did: losses, updates, measured steps."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fedld.analysis.decomposition import Decomposition
from fedld.analysis.diagnosis.evidence import Evidence, Finding, limit, listing, warning
from fedld.analysis.updates import UpdateMeasures, chosen_step, gram_report, split, update_measures
from fedld.records.schema import ConflictLine
from fedld.records.tables import gram_clients

ADVICE = {
    "local": "More local epochs, a larger learning rate or a larger model fit more of it.",
    "shift": "Margin control, FedProx or fewer local epochs hold local models closer to all clients' data.",
    "aggregation": "Another aggregation rule, or fewer local epochs so that models lie closer together.",
}


def diverged(evidence: Evidence) -> Iterator[Finding]:
    """Check for models with a loss that is not finite."""
    no_global = {int(line["round"]) for line in evidence.cross_losses if line["global_losses"] is None}
    decompositions = evidence.decompositions
    rounds = {t: d for t, d in decompositions if d.diverged or not (d.finite or t in no_global)}
    if not rounds:
        return
    names = sorted({evidence.name(i) for d in rounds.values() for i in d.diverged})
    who = f"the local model of {listing(names)}" if names else "the global model"
    yield warning(
        "diverged",
        f"In round {min(rounds)} {who} has no finite loss, so the decomposition is not defined there.",
        {"rounds": sorted(rounds), "clients": names},
        (),
        advice="Lower the learning rate, clip updates, or leave this client out.",
    )


def not_measured(evidence: Evidence) -> Iterator[Finding]:
    """Check for rounds with clients missing in their decomposition, because losses were not measured."""
    missing = {int(line["round"]): list(line.get("not_measured") or ()) for line in evidence.cross_losses}
    missing = {round_: clients for round_, clients in sorted(missing.items()) if clients}
    if not missing:
        return
    names = list(dict.fromkeys(name for clients in missing.values() for name in clients))
    rounds = listing([str(round_) for round_ in missing])
    yield warning(
        "not_measured",
        f"The losses of {listing(names)} were not all measured in round {rounds}: the decomposition there is "
        "over the other clients.",
        {str(round_): clients for round_, clients in missing.items()},
        (),
        advice=(
            "These values are missing, which says nothing about the model: see why these clients were away."
        ),
    )


def dominant_term(evidence: Evidence) -> Iterator[Finding]:
    """Report the last recorded round: which term is largest, and how the terms moved."""
    records = [(t, d) for t, d in evidence.decompositions if d.finite]
    if not records:
        return
    (first, before), (last, now) = records[0], records[-1]
    largest = max(ADVICE, key=lambda term: abs(getattr(now, term)))
    moves = {term: _move(getattr(before, term), getattr(now, term)) for term in ADVICE}
    movement = ", ".join(f"{term} {move}" for term, move in moves.items())
    since = f"; since round {first}: {movement}" if last > first else ""
    yield Finding(
        check="dominant_term",
        level="info",
        sentence=f"In round {last} the global loss {now.total:.3f} = local {now.local:.3f} + shift "
        f"{now.shift:+.3f} + "
        f"aggregation {now.aggregation:+.3f}; {largest} is largest{since}.",
        numbers={"round": last, "dominant": largest, "moves": moves, **now.to_json()},
        thresholds={"trend": limit("trend")},
        advice=ADVICE[largest],
    )


def costs(evidence: Evidence) -> Iterator[Finding]:
    """Check for terms with a large share of the global loss."""
    now = _last(evidence)
    if now is None:
        return
    # Averaging usually repairs part of the shift (aggregation < 0); only what is left of it costs.
    if _costs(now, "shift", repaired=min(now.aggregation, 0.0)):
        yield _shift(evidence, now)
    if _costs(now, "aggregation"):
        worst, share = evidence.name(now.most_hurt), now.aggregation / now.total
        yield warning(
            "aggregation_costs",
            f"Aggregation adds {now.aggregation:.3f} to the global loss ({share:.0%} of it): the global "
            f"model is worse than the average local model, most of all on {worst}.",
            {"aggregation": now.aggregation, "total": now.total, "client": worst},
            ("aggregation_share", "loss_floor", "standard_errors"),
            advice=ADVICE["aggregation"],
        )


def clients(evidence: Evidence) -> Iterator[Finding]:
    """Report which clients gain and which are hurt by aggregation."""
    now = _last(evidence)
    if now is None:
        return
    share = now.aggregation_by_client / now.total
    hurt = [evidence.name(int(i)) for i in np.flatnonzero(share >= limit("client_share"))]
    gain = [evidence.name(int(i)) for i in np.flatnonzero(share <= -limit("client_share"))]
    if not hurt or now.total < limit("loss_floor"):
        return
    others = f" while {listing(gain)} gain" if gain else ""
    yield warning(
        "hurt_clients",
        f"Aggregation hurts {listing(hurt)}{others}: there the average local model beats the global one.",
        {"hurt": hurt, "gain": gain, "aggregation_by_client": now.to_json()["aggregation_by_client"]},
        ("client_share", "loss_floor"),
        advice="If the same clients are hurt in every record, give them personal layers (FedBN, FedPAC).",
    )


def _shift(evidence: Evidence, now: Decomposition) -> Finding:
    worst, repaired = evidence.name(now.worst_shift), max(-now.aggregation, 0.0)
    left = now.shift - repaired
    advice = ADVICE["shift"]
    if evidence.labels_agree:
        advice = (
            "Labels agree between clients, so this is a shift of images or local over-fitting: fewer local "
            "epochs, weight decay or augmentation; margin control against site shortcuts."
        )
    return warning(
        "shift_costs",
        f"Distribution shift adds {now.shift:.3f} to the loss, of which averaging repairs {repaired:.3f} and "
        f"{left:.3f} stay ({left / now.total:.0%} of the global loss): local models do worse away from home, "
        f"that of {worst} most.",
        {"shift": now.shift, "left": left, "total": now.total, "client": worst},
        ("shift_share", "loss_floor", "standard_errors"),
        advice=advice,
    )


def _last(evidence: Evidence) -> Decomposition | None:
    finite = [d for _, d in evidence.decompositions if d.finite and d.total > 0]
    return finite[-1] if finite else None


def _costs(now: Decomposition, term: str, repaired: float = 0.0) -> bool:
    """Tell whether a term is large as a share and in itself, beyond the error of an estimate."""
    value: float = getattr(now, term)
    noise = limit("standard_errors") * now.standard_error[term] if now.standard_error else 0.0
    return value + repaired >= max(limit(f"{term}_share") * now.total, limit("loss_floor")) and value >= noise


def _move(before: float, now: float) -> str:
    if abs(now - before) <= limit("trend") * max(abs(now), abs(before)):
        return "steady"
    return "rises" if now > before else "falls"


def hidden(evidence: Evidence) -> Iterator[Finding]:
    """Report that the server saw sums alone: no single update is recorded."""
    took_part = [line for line in evidence.client_rounds if "excluded" not in line]
    if took_part and not evidence.reports and not any("update_norm" in line for line in took_part):
        yield Finding(
            check="hidden_updates",
            level="info",
            sentence="The server saw sums of updates alone: conflicts, outliers and the lengths of single "
            "updates are "
            "not known.",
            numbers={},
            thresholds={},
            advice="",
        )


def opposed_groups(evidence: Evidence) -> Iterator[Finding]:
    """Check whether the clients fall into two groups that pull in opposite directions."""
    groups = split(evidence.reports) if evidence.reports else None
    if groups is None or groups.between > limit("opposed_cosine"):
        return
    if groups.within < limit("agreeing_cosine") or groups.minority_weight < limit("minority_weight"):
        return
    votes = [_first_axis(report) for report in evidence.reports]
    majority, other = listing(groups.majority), listing(groups.minority)
    yield warning(
        "opposed_groups",
        f"Clients are split into two opposed groups: {majority} against {other} (mean cosine "
        f"{groups.between:.2f} across, {groups.minority_weight:.0%} of the samples on the smaller side).",
        {
            "majority": list(groups.majority),
            "minority": list(groups.minority),
            "between_cosine": groups.between,
            "within_cosine": None if np.isnan(groups.within) else groups.within,
            "minority_weight": groups.minority_weight,
            "first_axis_weight_for": float(np.median([v[0] for v in votes])),
            "first_axis_weight_against": float(np.median([v[1] for v in votes])),
        },
        ("opposed_cosine", "agreeing_cosine", "minority_weight"),
        advice="The first principal axis is this conflict and its votes cancel: compare the principal rule "
        "with the "
        "plain mean or consensus; if the groups' tasks truly differ, use personal layers (FedBN, FedPAC).",
    )


def conflict(evidence: Evidence) -> Iterator[Finding]:
    """Check whether many pairs of updates point away from each other, or the mean update cancels."""
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
        advice=_against_conflict(evidence, cancels),
    )


def _against_conflict(evidence: Evidence, cancels: bool) -> str:
    """Advise by what was measured: the clients' own losses on other steps, where there are some."""
    if evidence.trials:
        return "The clients measured other steps in every round: see what they chose."
    if cancels:
        return (
            "What is left of a cancelled step may be too short or too long, and no formula knows: let the "
            "clients measure it (fedld-measured, or --rule measured around any method)."
        )
    return "Fewer local epochs, a smaller learning rate or SCAFFOLD keep clients closer together."


def step(evidence: Evidence) -> Iterator[Finding]:
    """Check whether the rule's step is much shorter than the plain average's, or turns away from it."""
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
        advice=(
            "Compare with the plain mean, or let the clients measure which step is best (--rule measured)."
        ),
    )


def stability(evidence: Evidence) -> Iterator[Finding]:
    """Check whether the principal rule is near a point where it is discontinuous."""
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
        advice="Use conflict = smooth, which is continuous, or keep fewer axes.",
    )


def batchnorm(evidence: Evidence) -> Iterator[Finding]:
    """Check whether BatchNorm statistics differ between clients."""
    values = [v for line in evidence.rounds if (v := line.get("buffer_disagreement")) is not None]
    if not values or (disagreement := float(np.median(values))) < limit("buffer_disagreement"):
        return
    yield warning(
        "batchnorm",
        f"BatchNorm statistics disagree: running means lie {disagreement:.2f} standard deviations apart.",
        {"buffer_disagreement": disagreement},
        ("buffer_disagreement",),
        advice=(
            "Their average fits no client: try personal BatchNorm (FedBN or buffers = local), or GroupNorm."
        ),
    )


def _measures(line: ConflictLine) -> UpdateMeasures:
    names, weights = gram_clients(line)
    report = gram_report(line["gram"], weights, clients=names)
    return update_measures(report, tolerance=-limit("conflict_cosine"))


def _first_axis(line: ConflictLine) -> tuple[float, float]:
    """Add up the weights for and against the first axis (0 and 0 if all updates are zero)."""
    sides: Sequence[Sequence[float]] = (line["weight_for"] or [0.0], line["weight_against"] or [0.0])
    return sides[0][0], sides[1][0]


def measured_steps(evidence: Evidence) -> Iterator[Finding]:
    """Report which candidate the clients chose, how often, and its gain over the plain average."""
    counted = [trial for trial in evidence.trials if trial["fallback"] is None]
    if not counted:
        return
    chosen = Counter(chosen_step(trial) for trial in counted)
    (best, times), other = chosen.most_common(1)[0], sum(trial["chosen"] != 0 for trial in counted)
    gain = float(np.mean([trial["gain"] for trial in counted]))
    lengths = [trial["lengths"][trial["chosen"]] for trial in counted]
    yield Finding(
        check="measured_steps",
        level="info",
        sentence=f"In {other} of {len(counted)} rounds the clients measured another step as better than the "
        "plain "
        f"average; most often {best} ({times} of {len(counted)}); mean gain in loss {gain:.4f} per round.",
        numbers={"chosen": dict(chosen), "mean_gain": gain, "median_length": float(np.median(lengths))},
        thresholds={"measured_gain": limit("measured_gain")},
        advice=_advice(gain, float(np.median(lengths))),
    )


def silent_voters(evidence: Evidence) -> Iterator[Finding]:
    """Check for clients without usable measurements, and rounds that fell back to the average."""
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
        advice=(
            "Look at these clients' logs; a client that reports what cannot be should not vote (vote = "
            "median)."
        ),
    )


def _advice(gain: float, length: float) -> str:
    if gain < limit("measured_gain"):
        return "Measuring gains little here: FedAvg takes about the same steps and saves the exchange."
    if length > 1:
        return "The plain average's steps are too short here: keep measuring, or raise the learning rate."
    if length < 1:
        return "The plain average's steps are too long here: keep measuring, or lower the learning rate."
    return "Length is right and direction is not: keep measuring."
