"""The verdict in words: four answers to the four questions a reader opens the page with."""

from dataclasses import dataclass

from fedld.study.verdict import MEANING, Explanation, Standing, Verdict


@dataclass(frozen=True)
class Answer:
    """A question, its answer in a few words, and the evidence."""

    question: str
    answer: str
    detail: str
    tone: str = "plain"  # plain, good, unsure


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, typeset.

    >>> signed(-0.5), signed(0.125, 3), signed(-0.001)
    ('−0.50', '+0.125', '0.00')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def headline(verdict: Verdict) -> str:
    """One sentence."""
    winner, test = verdict.winner, verdict.decisive
    if test is None or test.difference is None or verdict.rival is None:
        return f"{winner.label}: {winner.mean:.2f} % after round {verdict.round}"
    lead = abs(test.difference.mean)
    verb = "beats" if test.significant else "is ahead of"
    tail = {True: "", False: ", but not significantly", None: " with a single seed"}[test.significant]
    if lead < 0.005:  # less than what is shown
        return f"{winner.label} and {verdict.rival} are level"
    return f"{winner.label} {verb} {verdict.rival} by {lead:.2f} points{tail}"


def answers(verdict: Verdict) -> list[Answer]:
    """Which method won, by how much, is it significant, which loss term explains it."""
    return [_who(verdict), _how_much(verdict), _sure(verdict), _why(verdict)]


def _who(verdict: Verdict) -> Answer:
    winner = verdict.winner
    spread = "" if winner.sd is None else f" ± {winner.sd:.2f}"
    detail = f"{winner.mean:.2f}{spread} % accuracy after round {verdict.round}"
    others = [f"{s.label} {s.mean:.2f}" for s in verdict.standings[1:] if not s.reference]
    bounds = [f"{s.label} {s.mean:.2f}" for s in verdict.standings[1:] if s.reference]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        detail += f"; then {', '.join(others[:3])}{more}"
    if bounds:
        detail += f"; for reference {', '.join(bounds)}"
    if len(verdict.standings) == 1:
        detail += "; there is nothing to compare it with"
    return Answer("Which method won?", winner.label, detail)


def _how_much(verdict: Verdict) -> Answer:
    test, question = verdict.decisive, "By how much?"
    if test is None or test.difference is None:
        return Answer(question, "–", "needs two methods with a seed in common", "unsure")
    mean = abs(test.difference.mean)
    return Answer(question, f"+{mean:.2f} points", f"over {verdict.rival}, {_interval(verdict, test)}")


def _interval(verdict: Verdict, test: Standing) -> str:
    assert test.difference is not None
    if test.difference.interval is None:
        return "from one seed: no interval"
    low, high = test.difference.interval
    if verdict.winner.label == verdict.baseline:
        low, high = -high, -low
    return f"95 % interval {signed(low)} to {signed(high)}, {test.difference.n} paired seeds"


def _sure(verdict: Verdict) -> Answer:
    test, question = verdict.decisive, "Is it significant?"
    if test is None or test.p_value is None:
        return Answer(
            question, "Cannot say", "a test needs two methods and at least two paired seeds", "unsure"
        )
    tested = sum(s.p_value is not None for s in verdict.standings)
    p = "< 0.001" if test.p_value < 0.001 else f"= {test.p_value:.3f}"
    detail = f"paired t test, p {p} after Holm's correction for {tested} comparison(s)"
    return (
        Answer(question, "Yes", detail, "good")
        if test.significant
        else Answer(question, "No", detail, "unsure")
    )


def _why(verdict: Verdict) -> Answer:
    question, found = "Which loss term explains it?", verdict.explanation
    if found is None or verdict.rival is None:
        return Answer(question, "Not measured", "run with --decompose 1 to measure the terms", "unsure")
    if found.total > 0:
        detail = (
            f"the loss on clients' data is {found.total:.3f} higher than {verdict.rival}'s, so the gain in "
            f"accuracy does not come from a lower loss ({terms(found)})"
        )
        return Answer(question, "None of them", detail, "unsure")
    share, interval = found.terms[found.term], found.intervals[found.term]
    if interval is not None and not found.clear:
        detail = (
            f"the largest part is {found.term} {signed(share, 3)}, but its 95 % interval is "
            f"{signed(interval[0], 3)} to {signed(interval[1], 3)} ({terms(found)})"
        )
        return Answer(question, "None clearly", detail, "unsure")
    part = f"{signed(share, 3)} of {signed(found.total, 3)}"
    detail = f"{MEANING[found.term]}: {part} against {verdict.rival} ({terms(found)})"
    return Answer(question, f"{found.term.capitalize()} loss", detail)


def terms(found: Explanation) -> str:
    """The three differences."""
    return ", ".join(f"{name} {signed(value, 3)}" for name, value in found.terms.items())
