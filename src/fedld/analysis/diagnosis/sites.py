"""Clients that stand out: missing, unusually long or turned updates, overruled."""

from collections.abc import Iterator

import numpy as np

from fedld.analysis.diagnosis.evidence import Evidence, Finding, listing, warning
from fedld.analysis.diagnosis.thresholds import limit
from fedld.analysis.participation import Participation
from fedld.records.schema import OutlierRecord


def absent(evidence: Evidence) -> Iterator[Finding]:
    """Clients that were asked and whose updates were not used."""
    absences = Participation(evidence.client_rounds).absences
    absences = [one for one in absences if len(one.rounds) >= limit("absent_rounds")]
    if not absences:
        return
    rest = f" {len(absences) - 3} more are missing at times." if len(absences) > 3 else ""
    yield warning(
        "absent",
        " ".join(one.sentence() for one in absences[:3]) + rest,
        {
            one.client: {"rounds": list(one.rounds), "share": one.share, "reasons": one.reasons}
            for one in absences
        },
        ("absent_rounds",),
        "The result says nothing about data that were not there: bring these clients back and continue, or "
        "leave them out on purpose; for updates that are not finite, lower the learning rate.",
    )


def outliers(evidence: Evidence) -> Iterator[Finding]:
    """Clients that the aggregation named: updates far longer than the others', or against them."""
    found: dict[tuple[str, str], list[OutlierRecord]] = {}
    for line in evidence.reports:
        for one in line.get("outliers") or []:
            found.setdefault((one["client"], one["kind"]), []).append(one)
    rounds = max(len(evidence.reports), 1)
    lasting = {key: own for key, own in found.items() if len(own) / rounds >= limit("outlier_share")}
    if not lasting:
        return
    parts = [
        f"{client} {_stands_out(kind, float(np.median([one['value'] for one in own])))} "
        f"({len(own)} of {rounds} rounds)"
        for (client, kind), own in lasting.items()
    ]
    yield warning(
        "outliers",
        f"Updates stand out: {'; '.join(parts[:4])}.",
        {f"{client}, {kind}": [one["value"] for one in own] for (client, kind), own in lasting.items()},
        ("outlier_share",),
        "Check these clients' labels, normalisation and learning rate first; a robust rule (median, krum) "
        "keeps one of them from deciding alone.",
    )


def _stands_out(kind: str, value: float) -> str:
    if kind == "length":
        return f"is {value:.3g} times as long as the median"
    return f"opposes the others (median cosine {value:.2f})"


def overruled(evidence: Evidence) -> Iterator[Finding]:
    """Clients whose updates point against what was done."""
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
            "Look at these clients' labels and images first; personal layers serve one that stays different.",
        )
