"""One sentence for the findings of several runs: numbers become means with their spread."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fedld.analysis.diagnosis.evidence import Finding
from fedld.analysis.diagnosis.losses import ADVICE

NUMBER = re.compile(r"(?<![\w.+\-])[+\-]?(?:\d+\.\d+(?!\w)|\d+(?=%))")
"""A measured number: a decimal fraction or a percentage. Whole numbers may be names: classes, clients."""


def merge_sentences(sentences: Sequence[str]) -> tuple[str, int]:
    """The most common wording, with the mean and standard deviation of every number that differs.

    Args:
        sentences: what a check said of each run.

    Returns:
        The sentence, and how many of the sentences have its wording.

    >>> merge_sentences(["a costs 0.10 (5%)", "a costs 0.30 (5%)", "b costs 0.90 (5%)"])
    ('a costs 0.20 ± 0.14 (5%)', 2)
    """
    wordings = [NUMBER.sub("#", sentence) for sentence in sentences]
    common = max(dict.fromkeys(wordings), key=wordings.count)
    alike = [sentence for sentence, wording in zip(sentences, wordings, strict=True) if wording == common]
    columns = iter(zip(*(NUMBER.findall(sentence) for sentence in alike), strict=True))
    return NUMBER.sub(lambda _: _spread(next(columns)), alike[0]), len(alike)


def _spread(texts: Sequence[str]) -> str:
    """Mean ± standard deviation of numbers that were printed; one number where they are equal."""
    if len(set(texts)) == 1:
        return texts[0]
    digits = max(1, *(len(text.partition(".")[2]) for text in texts))
    sign = "+" if any(text.startswith("+") for text in texts) else ""
    values = [float(text) for text in texts]
    return f"{fmean(values):{sign}.{digits}f} ± {stdev(values):.{digits}f}"


def merge_accounts(findings: Sequence[Finding], label: str) -> Finding:
    """The account of the last round (`dominant_term`) of one method: terms as means over its seeds."""
    numbers = [finding.numbers for finding in findings]
    count = len(findings)
    if count == 1:
        return findings[0]
    total, local, shift, aggregation = (
        _term(numbers, name) for name in ("total", "local", "shift", "aggregation")
    )
    means = {name: fmean(one[name] for one in numbers) for name in ADVICE}
    largest = max(means, key=lambda name: abs(means[name]))
    sentence = (
        f"{label}, round {numbers[0]['round']}, mean ± sd over {count} seeds: global loss {total} = local "
        f"{local} + shift {shift} + aggregation {aggregation}; {largest} is largest"
    )
    for name in ("shift", "aggregation"):
        below = sum(one[name] < 0 for one in numbers)
        if 0 < below < count:
            sentence += f"; {name} is below 0 in {below} of {count} seeds"
    first = findings[0]
    merged = {"round": numbers[0]["round"], "dominant": largest, "seeds": count, **means}
    return Finding(first.check, first.level, f"{sentence}.", merged, first.thresholds, ADVICE[largest])


def _term(numbers: Sequence[Mapping[str, Any]], name: str) -> str:
    sign = "+" if name in ("shift", "aggregation") else ""
    values = [float(one[name]) for one in numbers]
    return f"{fmean(values):{sign}.3f} ± {stdev(values):.3f}"
