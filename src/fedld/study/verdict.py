"""A comparison in words: what happened to every method, what to beware of, and a page's questions."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedld.analysis.diagnosis.evidence import listing
from fedld.analysis.sites import Participation
from fedld.methods import METHODS
from fedld.records.reader import by_label, clean
from fedld.registry import options_of
from fedld.study.measures import chance_level
from fedld.study.reasons import MEANING, Explanation, rate_warnings

if TYPE_CHECKING:
    from fedld.study.comparison import Comparison, Standing

FEW = 5  # seeds below which a difference deserves a warning
NEAR_CHANCE = 5.0  # points of balanced accuracy above guessing up to which a model has hardly learnt


@dataclass(frozen=True)
class PageAnswer:
    """A question, its answer in a few words, and the evidence."""

    question: str
    answer: str
    detail: str
    tone: str = "plain"  # plain, good, unsure


def signed(value: float, digits: int = 2) -> str:
    """Typeset a difference with its sign.

    >>> signed(-0.5), signed(0.125, 3), signed(-0.001)
    ('−0.50', '+0.125', '0.00')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if not float(text) else text.replace("-", "−")


def headline(comparison: "Comparison") -> str:
    """Write one sentence on every method named; models near chance come first."""
    return "; ".join(filter(None, [_guessing(comparison), _ranking(comparison)]))


def near_chance(comparison: "Comparison") -> dict[str, float]:
    """Give the mean balanced accuracy (%) of the deciding methods that have hardly learnt anything."""
    chance = chance_level(comparison.runs)
    if chance is None:
        return {}
    deciding = {comparison.baseline, comparison.winner.label if comparison.winner else ""}
    means = {s.label: s.mean("balanced_accuracy") for s in comparison.standings if s.label in deciding}
    return {label: v for label, v in means.items() if v is not None and v <= chance + NEAR_CHANCE}


def _guessing(comparison: "Comparison") -> str:
    """Write the sentence on models near chance; empty if there are none."""
    means = near_chance(comparison)
    if not means:
        return ""
    named = _listed([f"{label} ({mean:.1f} %)" for label, mean in means.items()])
    return (
        f"near chance ({chance_level(comparison.runs):.1f} % balanced accuracy): {named}, so train longer or "
        "at another learning rate before comparing"
    )


def _ranking(comparison: "Comparison") -> str:
    """Describe the winner against its rival, and where every other method stands."""
    winner, test, measure = comparison.winner, comparison.decisive, comparison.primary_measure
    if winner is None:
        return f"no method has a global model with a {measure.title} to compare"
    mean = winner.mean(comparison.primary)
    if test is None or test.difference is None or comparison.rival is None:
        value = "" if mean is None else f": {measure.format(mean)} {measure.title}"
        return f"{winner.label}{value} after round {comparison.round}"
    first = _lead(comparison, winner, test)
    mentioned = {winner.label, comparison.rival, comparison.baseline}
    rest = [s for s in comparison.ranked if s.label not in mentioned and not s.reference]
    clauses = [f"{s.label} is {_place(comparison, s)}" for s in rest]
    clauses += [
        f"for reference, {s.label} is {_place(comparison, s)}" for s in comparison.ranked if s.reference
    ]
    alone = [s.label for s in comparison.standings if comparison.primary not in s.values]
    clauses += [f"{', '.join(alone)} train{'s' if len(alone) == 1 else ''} no global model"] if alone else []
    against = f" (all against {comparison.baseline})" if len(rest) > 1 else ""
    return "; ".join([first, *clauses]) + against


def _lead(comparison: "Comparison", winner: "Standing", test: "Standing") -> str:
    """Describe the winner's lead over its rival, and what speaks against it."""
    assert test.difference is not None
    size = abs(test.difference.mean)
    if _level(comparison, size):
        return f"{winner.label} and {comparison.rival} are level"
    verb = "beats" if test.significant else "is ahead of"
    tail = {True: "", False: ", but not significantly", None: f" with a single {comparison.unit}"}[
        test.significant
    ]
    measure = "" if comparison.primary == comparison.first.name else f" of {comparison.primary_measure.title}"
    lead = f"{winner.label} {verb} {comparison.rival} by {_amount(comparison, size)}{measure}{tail}"
    return lead + _but(comparison, worse_in(comparison))


def _place(comparison: "Comparison", standing: "Standing") -> str:
    """Describe where a method stands against the baseline."""
    d = standing.difference
    if d is None:
        return f"not comparable: it shares no {comparison.unit} with {comparison.baseline}"
    if _level(comparison, d.mean):
        return f"level with {comparison.baseline}"
    side = "ahead" if d.mean * comparison.primary_measure.sign > 0 else "behind"
    sure = {True: "", False: " (not significant)", None: ""}[standing.significant]
    return f"{_amount(comparison, abs(d.mean))} {side}{sure}"


def _level(comparison: "Comparison", difference: float) -> bool:
    return round(abs(difference), comparison.primary_measure.digits) == 0


def _amount(comparison: "Comparison", size: float) -> str:
    return f"{size:.{comparison.primary_measure.digits}f}{comparison.primary_measure.points}"


def worse_in(comparison: "Comparison") -> dict[str, float]:
    """List measures in which the winner is worse than its rival: mean paired differences."""
    winner, test = comparison.winner, comparison.decisive
    if winner is None or test is None or comparison.rival is None:
        return {}
    sign = 1 if winner.label != comparison.baseline else -1
    differences = {
        name: sign * d.mean for name, d in test.differences.items() if _is_mentioned(comparison, name)
    }
    measures = comparison.measures
    return {
        name: value
        for name, value in differences.items()
        if round(value * measures[name].sign, measures[name].digits) < 0
    }


def _is_mentioned(comparison: "Comparison", name: str) -> bool:
    """Tell whether sentences mention a measure beside the primary one."""
    measure = comparison.measures[name]
    return name != comparison.primary and measure.worst is None and not measure.minor


def _but(comparison: "Comparison", worse: dict[str, float]) -> str:
    measures = comparison.measures
    parts = [f"{measures[name].title} ({signed(v, measures[name].digits)})" for name, v in worse.items()]
    return f", yet is worse in {_listed(parts)}" if parts else ""


def warnings(comparison: "Comparison") -> list[str]:
    """List failed runs, absences, unlearnt classes, wrong rates, few seeds, methods equal to another one."""
    kinds = (_failed, _absent, _unmeasured, _never, rate_warnings, _seeds, _same)
    return [line for kind in kinds for line in kind(comparison)]


def _failed(comparison: "Comparison") -> list[str]:
    """List runs that are missing from the table: of each method the seeds, and the first reason."""
    sentences = []
    for label, runs in by_label(comparison.failed).items():
        names = [str(run.seed) if run.fold is None else f"{run.seed} (fold {run.fold})" for run in runs]
        seeds = f"seed{'s' if len(runs) > 1 else ''} {listing(names)}"
        sentences.append(f"{label} failed with {seeds}, which the table is without: {runs[0].failure}")
    return sentences


def _absent(comparison: "Comparison") -> list[str]:
    """List the clients that were missing in each run; the first three, then the number of further ones."""
    sentences = [
        f"{run.label}, {run.repetition}: {clean(absence.sentence().rstrip('.'))}"
        for run in comparison.runs
        for absence in Participation(run.clients.lines).absences
    ]
    return sentences[:3] + (
        [f"{len(sentences) - 3} more absences in these runs"] if len(sentences) > 3 else []
    )


def _unmeasured(comparison: "Comparison") -> list[str]:
    """Say why there is no value of the primary measure, if there is none."""
    measure = comparison.primary_measure
    if not comparison.standings or any(comparison.primary in s.values for s in comparison.standings):
        return []
    if measure.worst:
        return [f"there is no {measure.title}: the clients have no test samples of their own"]
    return [f"there is no {measure.title} in the last evaluation of any run"]


def _never(comparison: "Comparison") -> list[str]:
    decisive = {comparison.baseline, comparison.winner.label if comparison.winner else ""}
    decisive = decisive if len(comparison.standings) > 1 else set()
    sentences = []
    for s in comparison.standings:
        if s.never:
            classes = listing([f"'{name}'" for name in s.never])
            runs = sum(run.label == s.label for run in comparison.runs)
            seeds = f"in {max(s.never.values())} of {runs} {'runs' if comparison.folds else 'seeds'}"
            tail = ": the comparison rests on a model that has not learnt it" if s.label in decisive else ""
            sentences.append(f"{s.label} never predicts {classes} ({seeds}){tail}")
    return sentences


def _seeds(comparison: "Comparison") -> list[str]:
    pairs = [s.difference.n for s in comparison.standings if s.difference is not None]
    if not pairs or min(pairs) >= FEW:
        return []
    count = f"{min(pairs)} paired {comparison.unit}{'s' if min(pairs) > 1 else ''}"
    return [f"{count}: take {FEW} or more before you believe a difference or its absence"]


def _same(comparison: "Comparison") -> list[str]:
    """List methods that are FedAvg here: clients have no part to keep, or all rounds are equal to it."""
    sentences = [
        f"{s.label} is FedAvg here: the network has no BatchNorm that could stay with the clients"
        for s in comparison.standings
        if s.same_as_fedavg
    ]
    base = next((s for s in comparison.standings if s.label == comparison.baseline), None)
    for s in comparison.standings:
        if (
            base is not None
            and s is not base
            and not s.same_as_fedavg
            and _equal(s, base, comparison.primary)
        ):
            sentences.append(
                f"{s.label} has the same {comparison.primary_measure.title} as {base.label} in every "
                f"{comparison.unit}: its own term hardly does anything at these settings"
                f"{_own_numbers(comparison, s.label)}"
            )
    return sentences


def _equal(standing: "Standing", base: "Standing", primary: str) -> bool:
    """Tell whether a method has the baseline's value in every seed, and its loss within one percent."""
    ours, theirs = standing.values.get(primary, {}), base.values.get(primary, {})
    seeds = ours.keys() & theirs.keys()
    loss, other = standing.mean("loss"), base.mean("loss")
    close = loss is None or other is None or abs(loss - other) <= 0.01 * abs(other)
    return bool(seeds) and close and all(ours[seed] == theirs[seed] for seed in seeds)


def _own_numbers(comparison: "Comparison", label: str) -> str:
    """List the method's own numbers, which a user may change."""
    run = next(run for run in comparison.runs if run.label == label)
    method = run.config.get("method")
    numbers = {k: v for k, v in method.items() if k != "name"} if isinstance(method, dict) else {}
    if run.method in METHODS:
        common = options_of(METHODS["fedavg"])
        defaults = {k: v for k, v in options_of(METHODS[run.method]).items() if k not in common}
        numbers = defaults | numbers
    text = ", ".join(f"{clean(key)} = {clean(value)}" for key, value in numbers.items())
    return f" ({text})" if text else ""


def answers(comparison: "Comparison") -> list[PageAnswer]:
    """Answer: which method won, by how much, is it significant, which loss term explains it."""
    if len(comparison.standings) == 1:
        return _of_one(comparison)
    return [_who(comparison), _how_much(comparison), _sure(comparison), _why(comparison)]


def _of_one(comparison: "Comparison") -> list[PageAnswer]:
    """Answer for a single method: how good it is, over how many seeds, and how its worst client is served."""
    (only,) = comparison.standings
    mean = only.mean(comparison.primary)
    value = "–" if mean is None else comparison.primary_measure.format(mean)
    measures = comparison.measures
    means = {name: only.mean(name) for name in measures if _is_mentioned(comparison, name)}
    values = [
        f"{measures[name].title} {measures[name].format(v)}" for name, v in means.items() if v is not None
    ]
    seeds = f"{len(only.seeds)} {comparison.unit}{'s' if len(only.seeds) > 1 else ''}"
    primary = f"{comparison.primary_measure.title} after round {comparison.round}, {seeds}"
    page_answers = [PageAnswer("How good is it?", value, f"{primary}; {', '.join(values)}")]
    for measure in measures.values():
        if measure.worst and measure.name != comparison.primary:
            worst = only.mean(measure.name)
            if worst is not None:
                title = measures[measure.worst].title
                detail = f"the worst {title} of the global model on any client's own test set"
                page_answers.append(
                    PageAnswer("How is the worst client served?", measure.format(worst), detail)
                )
    if only.account.total is not None:
        page_answers.append(
            PageAnswer("What does it lose, and where?", f"{only.account.total:.3f}", _terms_of(only))
        )
    return page_answers


def _terms_of(standing: "Standing") -> str:
    a = standing.account
    parts = [("local", a.local), ("shift", a.shift), ("aggregation", a.aggregation)]
    return "global loss = " + ", ".join(f"{name} {signed(v, 3)}" for name, v in parts if v is not None)


def _who(comparison: "Comparison") -> PageAnswer:
    winner, question = comparison.winner, "Which method won?"
    if winner is None:
        return PageAnswer(question, "–", headline(comparison), "unsure")
    if winner.label in near_chance(comparison):
        return PageAnswer(question, "None has learnt", _guessing(comparison), "unsure")
    measure = comparison.primary_measure
    places = [(s, s.mean(comparison.primary)) for s in comparison.ranked]
    values = [(s, f"{s.label} {m:.{measure.digits}f}") for s, m in places if m is not None]
    federated = ", ".join(text for s, text in values if not s.reference)
    detail = f"{measure.title} after round {comparison.round}: {federated}"
    bounds = [text for s, text in values if s.reference]
    return PageAnswer(
        question, winner.label, detail + (f"; for reference {', '.join(bounds)}" if bounds else "")
    )


def _how_much(comparison: "Comparison") -> PageAnswer:
    test, question = comparison.decisive, "By how much?"
    if test is None or test.difference is None:
        return PageAnswer(question, "–", f"needs two methods with a {comparison.unit} in common", "unsure")
    amount = _amount(comparison, abs(test.difference.mean))
    worse = _but(comparison, worse_in(comparison)).removeprefix(", ")
    detail = f"over {comparison.rival}, {_interval(comparison, test)}" + (f"; {worse}" if worse else "")
    return PageAnswer(question, f"+{amount}", detail, "unsure" if worse else "plain")


def _interval(comparison: "Comparison", test: "Standing") -> str:
    assert test.difference is not None
    if test.difference.interval is None:
        return f"from one {comparison.unit}: no interval"
    low, high = test.difference.interval
    if comparison.winner is not None and comparison.winner.label == comparison.baseline:
        low, high = -high, -low
    digits = comparison.primary_measure.digits
    count = f"{test.difference.n} paired {comparison.unit}s"
    return f"95 % interval {signed(low, digits)} to {signed(high, digits)}, {count}"


def _sure(comparison: "Comparison") -> PageAnswer:
    test, question = comparison.decisive, "Is it significant?"
    if test is None or test.p_value is None:
        return PageAnswer(
            question,
            "Cannot say",
            f"a test needs two methods and at least two paired {comparison.unit}s",
            "unsure",
        )
    tested = sum(s.p_value is not None for s in comparison.standings)
    p = "< 0.001" if test.p_value < 0.001 else f"= {test.p_value:.3f}"
    name = "corrected resampled t test over folds" if comparison.folds else "paired t test"
    detail = f"{name}, p {p} after Holm's correction for {tested} comparison(s)"
    if test.difference is not None and (size := test.difference.effect_size) is not None:
        detail += f"; effect size {abs(size):.1f} standard deviations of the difference"
    return (
        PageAnswer(question, "Yes", detail, "good")
        if test.significant
        else PageAnswer(question, "No", detail, "unsure")
    )


def _why(comparison: "Comparison") -> PageAnswer:
    question, explanation = "Which loss term explains it?", comparison.explanation
    if explanation is None or comparison.rival is None:
        return PageAnswer(question, "Not measured", "run with --decompose 1 to measure the terms", "unsure")
    if explanation.total > 0:
        detail = (
            f"the loss on clients' data is {explanation.total:.3f} higher than {comparison.rival}'s, so the "
            f"gain does not come from a lower loss ({terms(explanation)})"
        )
        return PageAnswer(question, "None of them", detail, "unsure")
    share, interval = explanation.terms[explanation.term], explanation.intervals[explanation.term]
    if interval is not None and not explanation.clear:
        detail = (
            f"the largest part is {explanation.term} {signed(share, 3)}, but its 95 % interval is "
            f"{signed(interval[0], 3)} to {signed(interval[1], 3)} ({terms(explanation)})"
        )
        return PageAnswer(question, "None clearly", detail, "unsure")
    part = f"{signed(share, 3)} of {signed(explanation.total, 3)}"
    detail = f"{MEANING[explanation.term]}: {part} against {comparison.rival} ({terms(explanation)})"
    return PageAnswer(question, f"{explanation.term.capitalize()} loss", detail)


def terms(explanation: Explanation) -> str:
    """Format the three differences."""
    return ", ".join(f"{name} {signed(value, 3)}" for name, value in explanation.terms.items())


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
