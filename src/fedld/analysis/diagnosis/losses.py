"""What the loss decomposition tells: which term costs, how it moves, and who is to blame."""

from collections.abc import Iterator

import numpy as np

from fedld.analysis.decomposition import Decomposition
from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, warning
from fedld.analysis.diagnosis.thresholds import limit

ADVICE = {
    "local": "More local epochs, a larger learning rate or a larger model fit more of it.",
    "shift": "Margin control, FedProx or fewer local epochs hold local models closer to all clients' data.",
    "aggregation": "Another aggregation rule, or fewer local epochs so that models lie closer together.",
}


def diverged(evidence: Evidence) -> Iterator[Finding]:
    """Models whose loss is not finite."""
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
        "Lower the learning rate, clip updates, or leave this client out.",
    )


def not_measured(evidence: Evidence) -> Iterator[Finding]:
    """Rounds whose decomposition lacks clients, because their losses were not measured."""
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
        "These values are missing, which says nothing about the model: see why these clients were away.",
    )


def dominant_term(evidence: Evidence) -> Iterator[Finding]:
    """The account of the last recorded round: which term is largest, and how the terms moved."""
    records = [(t, d) for t, d in evidence.decompositions if d.finite]
    if not records:
        return
    (first, before), (last, now) = records[0], records[-1]
    largest = max(ADVICE, key=lambda term: abs(getattr(now, term)))
    moves = {term: _move(getattr(before, term), getattr(now, term)) for term in ADVICE}
    movement = ", ".join(f"{term} {move}" for term, move in moves.items())
    since = f"; since round {first}: {movement}" if last > first else ""
    yield Finding(
        "dominant_term",
        "info",
        f"In round {last} the global loss {now.total:.3f} = local {now.local:.3f} + shift {now.shift:+.3f} + "
        f"aggregation {now.aggregation:+.3f}; {largest} is largest{since}.",
        {"round": last, "dominant": largest, "moves": moves, **now.to_json()},
        {"trend": limit("trend")},
        ADVICE[largest],
    )


def costs(evidence: Evidence) -> Iterator[Finding]:
    """Terms that take a share of the global loss worth doing something about."""
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
            ADVICE["aggregation"],
        )


def clients(evidence: Evidence) -> Iterator[Finding]:
    """Which clients gain and which are hurt by aggregation."""
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
        "If the same clients are hurt in every record, give them personal layers (FedBN, FedPAC).",
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
        advice,
    )


def _last(evidence: Evidence) -> Decomposition | None:
    finite = [d for _, d in evidence.decompositions if d.finite and d.total > 0]
    return finite[-1] if finite else None


def _costs(now: Decomposition, term: str, repaired: float = 0.0) -> bool:
    """Large as a share and in itself, and not explained by the error of an estimate."""
    value: float = getattr(now, term)
    noise = limit("standard_errors") * now.standard_error[term] if now.standard_error else 0.0
    return value + repaired >= max(limit(f"{term}_share") * now.total, limit("loss_floor")) and value >= noise


def _move(before: float, now: float) -> str:
    if abs(now - before) <= limit("trend") * max(abs(now), abs(before)):
        return "steady"
    return "rises" if now > before else "falls"
