"""Write the generated blocks of README and of the pages in docs/.

A block stands between two comments. The first one holds a jinja template, the text between them is what the
template gives:

    <!-- generated
    {{ table("covid-table1", "final difference p_value", rows="fedavg fedld") }}
    -->
    (the table)
    <!-- /generated -->

Templates may use the functions of `FUNCTIONS`; columns are those of `COLUMNS`. `evidence.md` is made from
`templates/evidence.md.j2` when the documentation is built.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fedld.errors import FedLDError
from fedld.study.comparison import Comparison, Standing, with_differences
from reproduction.evidence import (
    AT_SITE,
    FOLDER,
    Study,
    load_figure,
    load_study,
    names,
    numbers_of,
    read_commands,
)

ROOT = FOLDER.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(<!-- generated\s(.*?)-->\n).*?(<!-- /generated -->)", re.DOTALL)
_FIVE = "Five clients, Dirichlet {}; lambda 0.03; one rate: 0.01."
PUBLISHED = {"fedavg": "FedAvg", "none": "FedAvg"}


@dataclass(frozen=True)
class Row:
    """A row of a study, as columns read it."""

    study: Study
    standing: Standing

    @property
    def label(self) -> str:
        """Name of the method."""
        return self.standing.label

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the method."""
        return self.study.settings[self.label]


@dataclass(frozen=True)
class Column:
    """A column: its heading, the cell of a row, and the number behind it for ranges."""

    heading: str
    text: Callable[[Row], str]
    number: Callable[[Row], float | None] = lambda _: None
    form: str = ".1f"  # of a range


def rows_of(name: str) -> list[Row]:
    """Return the rows of a study."""
    study = load_study(name)
    return [Row(study, standing) for standing in study.comparison.standings]


def row_of(name: str, label: str) -> Row:
    """Return one row of a study."""
    study = load_study(name)
    return Row(study, study.standing(label))


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return mean ± standard deviation over seeds.

    >>> spread([80.0, 82.0])
    '81.00 ± 1.41'
    """
    values = list(values)
    if not values:
        return "-"
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def _measured(heading: str, series: Callable[[Standing], Mapping[int, float]], digits: int = 2) -> Column:
    """Make a column of values by seed."""

    def mean(row: Row) -> float | None:
        values = series(row.standing).values()
        return fmean(values) if values else None

    form = ".3f" if digits == 4 else ".1f"
    return Column(heading, lambda row: spread(series(row.standing).values(), digits), mean, form)


def _score(name: str) -> Callable[[Standing], Mapping[int, float]]:
    return lambda standing: standing.values.get(name, {})


def _single(
    heading: str,
    value: Callable[[Row], float | None],
    form: str,
    missing: str = "-",
    range_form: str | None = None,
) -> Column:
    """Make a column of one number for all seeds."""

    def text(row: Row) -> str:
        number = value(row)
        return missing if number is None else format(number, form)

    return Column(heading, text, value, range_form or form)


def _term(heading: str, name: str, form: str, range_form: str | None = None) -> Column:
    return _single(heading, lambda row: getattr(row.standing.account, name), form, range_form=range_form)


def _setting(row: Row, *keys: str) -> str:
    value = next((row.settings[key] for key in keys if key in row.settings), None)
    return "-" if value is None else f"{value}"


def _difference(standing: Standing, scale: float = 1.0, digits: int = 2) -> str:
    """Return the paired difference to the baseline with its interval."""
    d = standing.difference
    if d is None:
        return ""
    form = f"+.{digits}f"
    interval = f" [{scale * d.interval[0]:{form}}, {scale * d.interval[1]:{form}}]" if d.interval else ""
    return f"{scale * d.mean:{form}}{interval}"


def _primary_text(row: Row) -> str:
    """Return the measure that decides, with its own number of digits."""
    shown = row.study.comparison.primary_measure
    return spread(row.standing.values.get(shown.name, {}).values(), shown.digits)


@cache
def _decided_by(name: str, measure: str) -> dict[str, Standing]:
    return {standing.label: standing for standing in load_study(name).in_measure(measure).standings}


def p_text(p: float | None) -> str:
    """Return a p value; small ones are not rounded to nothing.

    >>> p_text(0.0123), p_text(0.0001), p_text(None)
    ('0.012', '< 0.001', '')
    """
    return "" if p is None else f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def gap(row: Row) -> float | None:
    """Return the share of pooled training's lead over the baseline that a method wins.

    There is no such share where pooled training is not significantly ahead (its interval holds 0).
    """
    standings = {standing.label: standing for standing in row.study.comparison.standings}
    pooled = standings["central"].difference if "central" in standings else None
    if pooled is None or pooled.interval is None or pooled.interval[0] <= 0 or not row.standing.difference:
        return None
    return row.standing.difference.mean / pooled.mean


def _never(row: Row) -> str:
    """Return the classes that the model never predicts, and in how many of the seeds."""
    seeds = len(row.standing.seeds)
    classes = row.standing.never.items()
    return ", ".join(f"{name} ({count} of {seeds} seeds)" for name, count in classes) or "-"


def _mean_difference(row: Row) -> float | None:
    return None if row.standing.difference is None else row.standing.difference.mean


def _effect(row: Row) -> float | None:
    return None if row.standing.difference is None else row.standing.difference.effect_size


def _rounds_to_target(row: Row) -> str:
    if not row.standing.values or row.study.comparison.level is None:
        return "-"
    return "not reached" if row.standing.reached is None else f"{row.standing.reached.round}"


COLUMNS: dict[str, Column] = {
    "lr": Column("rate", lambda row: _setting(row, "lr")),
    "strength": Column("lambda, mu", lambda row: _setting(row, "lam", "mu")),
    "final": _measured("final, %", lambda s: s.values.get(s.measures[0], {})),
    "difference": Column(
        "difference to {baseline} [95 %]", lambda row: _difference(row.standing), _mean_difference, "+.1f"
    ),
    "primary": Column("{primary}", _primary_text),
    "primary_difference": Column(
        "difference to {baseline} [95 %]",
        lambda row: _difference(row.standing, digits=row.study.comparison.primary_measure.digits),
    ),
    "own_models": Column(
        "{primary}, own models",
        lambda row: spread(row.standing.personal.values(), row.study.comparison.primary_measure.digits),
    ),
    "p_value": Column("p (Holm)", lambda row: p_text(row.standing.p_value)),
    "effect_size": _single("effect", _effect, "+.1f", ""),
    "last5": _measured("last 5", lambda s: s.last5),
    "best": _measured("best", lambda s: s.best),
    "personal": _measured("personalised", lambda s: s.personal),
    "balanced_accuracy": _measured("balanced, %", _score("balanced_accuracy")),
    "auroc": _measured("AUROC", _score("auroc"), 4),
    "auroc_difference": Column(
        "AUROC, points to {baseline} [95 %]",
        lambda row: _difference(_decided_by(row.study.name, "auroc")[row.label], 100),
    ),
    "worst_client": _measured("worst client, %", _score("worst_client")),
    "loss": _measured("loss", _score("loss"), 3),
    "step": _term("step / average's", "step", ".2f", ".1f"),
    "cosine": _term("cosine", "cosine", ".2f", ".1f"),
    "local": _term("local", "local", ".2f"),
    "shift": _term("+ shift", "shift", "+.2f"),
    "aggregation": _term("+ aggregation", "aggregation", "+.2f"),
    "gap": _single("of the gap to pooled data", gap, ".0%"),
    "never_predicted": Column("never predicted", _never),
    "rounds_to_target": Column("rounds to target", _rounds_to_target),
    "megabytes": _single("MB", lambda row: row.standing.megabytes, ".1f"),
    "seconds": _single("s", lambda row: row.standing.seconds, ".0f", range_form=".1f"),
}


def column(name: str) -> Column:
    """Return a column.

    Raises:
        FedLDError: there is no such column.
    """
    if name not in COLUMNS:
        raise FedLDError(f"unknown column '{name}': there are {', '.join(COLUMNS)}")
    return COLUMNS[name]


def markdown(head: list[str], body: Mapping[str, list[str]]) -> str:
    """Return a Markdown table with the rows' names in front."""
    lines = [["", *head], *([f"`{label}`", *cells] for label, cells in body.items())]
    first, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * (len(head) + 1), *rest])


def table(name: str, columns: str, rows: str = "") -> str:
    """Return a study as a table.

    Args:
        name: of the study.
        columns: their names, with spaces between them.
        rows: labels of some methods; all unless given.
    """
    chosen = rows.split()
    comparison = load_study(name).comparison
    baseline = PUBLISHED.get(comparison.baseline, comparison.baseline)
    primary = f"{comparison.primary_measure.title} {comparison.primary_measure.unit}".strip()
    head = [column(c).heading.format(baseline=baseline, primary=primary) for c in columns.split()]
    body = {
        row.label: [column(c).text(row) for c in columns.split()]
        for row in rows_of(name)
        if not chosen or row.label in chosen
    }
    return markdown(head, body)


def across(name: str, studies: Mapping[str, str], rows: str = "") -> str:
    """Return one column of several studies beside each other.

    Args:
        name: of the column.
        studies: heading and name of each study.
        rows: labels of some methods; all unless given.
    """
    chosen = rows.split()
    by_study = [{row.label: row for row in rows_of(study)} for study in studies.values()]
    labels = dict.fromkeys(label for found in by_study for label in found if not chosen or label in chosen)
    body = {
        label: [column(name).text(found[label]) if label in found else "-" for found in by_study]
        for label in labels
    }
    return markdown(list(studies), {label: cells for label, cells in body.items() if any(cells)})


def with_closed_form(name: str, closed: str) -> Comparison:
    """Return a study with the rows of a closed form beside its own, compared by the package's statistics.

    A closed form depends on no seed, so its one run stands beside every seed of the baseline.

    Args:
        name: of the study.
        closed: name of the study of one run of each closed form, on the same federation.

    Raises:
        FedLDError: the studies are of different federations, or the closed form has several seeds.
    """
    study, other = load_study(name), load_study(closed)
    if study.federation != other.federation:
        raise FedLDError(f"'{name}' is on {study.federation}, '{closed}' on {other.federation}")
    comparison = study.comparison
    seeds = study.standing(comparison.baseline).seeds
    rows = list(comparison.standings)
    for standing in other.comparison.standings:
        if len(standing.seeds) != 1:
            raise FedLDError(f"'{closed}' has {len(standing.seeds)} seeds; a closed form has one run")
        values = {key: dict.fromkeys(seeds, *of.values()) for key, of in standing.values.items()}
        rows.append(replace(standing, seeds=seeds, values=values))
    return replace(comparison, standings=with_differences(rows, comparison.baseline, comparison.primary))


def choice(name: str, target: str, closed: str, rows: str) -> str:
    """Return accuracy against the baseline, rounds to its final accuracy and traffic until then.

    Args:
        name: of the study that accuracies are from.
        target: of the long study that rounds and traffic are from.
        closed: of the study of the closed forms; they reach the target in their own rounds or not at all.
        rows: labels of the methods, in their order.
    """
    standings = {standing.label: standing for standing in with_closed_form(name, closed).standings}
    level = load_study(target).comparison.level
    closed_study = load_study(closed)
    closed_labels = {standing.label for standing in closed_study.comparison.standings}
    body = {}
    for label in rows.split():
        standing = standings[label]
        reached: tuple[int, float] | None = None
        if label in closed_labels:
            accuracy = standing.mean("accuracy")
            if level is not None and accuracy is not None and accuracy >= level:
                reached = closed_study.comparison.round, standing.megabytes
        elif found := load_study(target).standing(label).reached:
            reached = found.round, found.megabytes
        cost = [f"{reached[0]}", f"{reached[1]:,.0f}"] if reached else ["not reached", "-"]
        body[label] = [_difference(standing) or "0", *cost]
    return markdown(
        ["accuracy, points to FedAvg [95 %]", "rounds to FedAvg's accuracy", "MB until then"], body
    )


def by_site(name: str, rows: str = "") -> str:
    """Return a measure at every site, a column each, and the mean over sites; means over seeds.

    Args:
        name: of a study whose cases were judged one by one (segmentation).
        rows: labels of some methods; all unless given.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for number in numbers_of(name):
        if number.measure.startswith(AT_SITE):
            by_label = found.setdefault(number.method, {})
            by_label.setdefault(number.measure.removeprefix(AT_SITE), []).append(number.value)
    sites = sorted({site for values in found.values() for site in values})
    body = {}
    for label, values in found.items():
        if not rows or label in rows.split():
            means = [fmean(values[site]) for site in sites]
            body[label] = [*(f"{mean:.3f}" for mean in means), f"{fmean(means):.3f}"]
    return markdown([*sites, "mean of sites"], body)


def value(name: str, label: str, column_name: str) -> str:
    """Return one cell of a study."""
    return column(column_name).text(row_of(name, label))


def span(label: str, column_name: str, *patterns: str) -> str:
    """Return the smallest and the largest mean of a method over several studies."""
    chosen = column(column_name)
    means = sorted(
        mean for name in names(*patterns) if (mean := chosen.number(row_of(name, label))) is not None
    )
    return f"{means[0]:{chosen.form}} to {means[-1]:{chosen.form}}"


def standings(measure: str, *patterns: str, rows: str = "") -> str:
    """Return how often each method is significantly ahead of the baseline and behind it, and by how much.

    Args:
        measure: `accuracy` or `auroc`, both in points.
        patterns: names of the studies.
        rows: labels of some methods; all unless given.
    """
    if measure not in ("accuracy", "auroc"):
        raise FedLDError(f"standings are in accuracy or auroc, not '{measure}'")
    scale = 100 if measure == "auroc" else 1
    tests: dict[str, list[Standing]] = {}
    for name in names(*patterns):
        for label, standing in _decided_by(name, measure).items():
            if standing.difference is not None and (not rows or label in rows.split()):
                tests.setdefault(label, []).append(standing)
    body = {}
    for label, found in tests.items():
        differences = [scale * one.difference.mean for one in found if one.difference]
        ahead = sum(bool(one.significant) and d > 0 for one, d in zip(found, differences, strict=True))
        behind = sum(bool(one.significant) and d < 0 for one, d in zip(found, differences, strict=True))
        body[label] = [str(count) for count in (ahead, len(found) - ahead - behind, behind)]
        body[label] += [f"{of(differences):+.2f}" for of in (fmean, min, max)]
    return markdown(["surely ahead", "not told apart", "surely behind", "mean", "worst", "best"], body)


def figure(name: str) -> str:
    """Return the table of a Figure 2."""
    return "\n".join(line for line in load_figure(name).to_markdown().splitlines() if line.startswith("|"))


def point(name: str, arms: str, term: str, alpha: float | str) -> str:
    """Return a term of a Figure 2, mean over seeds.

    Args:
        name: of the study.
        arms: an arm, `margin-plain` for a difference or `margin/plain` for one in per cent.
        term: `local`, `shift`, `aggregation` or `total`.
        alpha: of Dirichlet, or `all` for the range over all.
    """
    found = load_figure(name)
    first, sign, second = re.split(r"([-/])", arms) if re.search(r"[-/]", arms) else (arms, "", "")

    def mean(arm: str, at: float) -> float:
        values = found.values(arm, term, at)
        if not values:
            raise FedLDError(f"study '{name}' has no '{arm}' at alpha {at}")
        return fmean(values)

    def text(at: float) -> str:
        if not sign:
            return f"{mean(first, at):.3f}"
        change = mean(first, at) - mean(second, at)
        return f"{change:+.3f}" if sign == "-" else f"{change / mean(second, at):+.0%}".replace("%", " %")

    if alpha != "all":
        return text(float(alpha))
    texts = sorted({text(at) for at in found.alphas}, key=lambda one: float(one.split()[0]))
    return f"{texts[0]} to {texts[-1]}"


def candidates(name: str) -> str:
    """Return the candidates of a search with what held-out images said, the best first.

    Args:
        name: of the search, `tune/...`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for number in numbers_of(name):
        settings = json.loads(number.settings)
        row = rows.setdefault(settings.pop("candidate"), {"settings": settings})
        row[number.measure] = number.value
    head = ["rounds", "last three, %", "best, %", "AUROC", "loss", "largest training loss, rounds 1 and 2"]
    body = {
        label: [
            f"{row['settings']['rounds']}",
            f"{row['held_out_accuracy']:.1f}",
            f"{row['held_out_best']:.1f}",
            f"{row['held_out_auroc']:.4f}",
            f"{row['held_out_loss']:.3f}",
            f"{row['largest_train_loss_round1']:.2f}, {row['largest_train_loss_round2']:.2f}",
        ]
        for label, row in rows.items()
    }
    return markdown(head, body)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "table": table,
    "across": across,
    "choice": choice,
    "by_site": by_site,
    "value": value,
    "span": span,
    "standings": standings,
    "candidates": candidates,
    "figure": figure,
    "point": point,
    "names": names,
    "study": load_study,
}
FEW = "scaffold fedacg fedld measured fedld-measured fedld-drift central"
"""Methods that the page of the reproduction shows; the page of all tables has every one."""
ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # the templates are ours and write Markdown
)
ENVIRONMENT.globals.update(FUNCTIONS, few=FEW)


def current(page: str) -> str:
    """Return a page with every block as the tidy file has it."""

    def block(found: re.Match[str]) -> str:
        text = ENVIRONMENT.from_string(found[2].strip()).render().strip()
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return BLOCK.sub(block, page)


def update_pages(pages: Iterable[Path] = PAGES, write: bool = True) -> list[str]:
    """Rewrite the pages that are not current.

    Args:
        pages: their paths.
        write: whether to write them; otherwise they are only named.

    Returns:
        The names of the pages that were not current.
    """
    stale = []
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if (new := current(text)) != text:
            stale.append(path.name)
            if write:
                path.write_text(new, encoding="utf-8")
    return stale


FEDERATIONS = (
    (
        "covid",
        "Chest X-rays by site",
        "`covidfl96`, 12 sites; lambda 0.01; one rate: 0.03.",
        True,
    ),
    (
        "retina-split1",
        "Retina, published list 1",
        "`retina_kaggle96`, five clients, Dirichlet 100; lambda 0.1; one rate: 0.01.",
        False,
    ),
    ("retina-split2", "Retina, published list 2", _FIVE.format(1), False),
    ("retina-split3", "Retina, published list 3", _FIVE.format(0.5), False),
    (
        "retina-dirichlet0.1",
        "Retina, Dirichlet 0.1",
        "All photographs of the file, dealt anew for every seed, five clients; lambda 0.03; one rate: 0.01.",
        False,
    ),
    (
        "fundus-dirichlet0.5",
        "Photographs of two programmes, Dirichlet 0.5",
        "Five clients; lambda 0.03; one rate: 0.01.",
        True,
    ),
    (
        "fundus-source",
        "Photographs of two programmes by source",
        "Four sources of 34 to 1,328 photographs; lambda 0.01; one rate: 0.01.",
        True,
    ),
)
"""Federations of the page of all tables: name, title, description, whether test images have sites."""


def by_rate(start: str, values: str, end: str = "") -> dict[str, str]:
    """Return the studies of some values of a setting, by value.

    >>> by_rate("covid-head-lr", "0.01 0.1")
    {'0.01': 'covid-head-lr0.01', '0.1': 'covid-head-lr0.1'}
    """
    return {one: f"{start}{one}{end}" for one in values.split()}


def evidence_page() -> str:
    """Return the page of all tables, as Markdown."""
    template = ENVIRONMENT.get_template("evidence.md.j2")
    text = template.render(federations=FEDERATIONS, by_rate=by_rate, others=[])
    others = [name for name in comparisons() if f"(evidence/{name}.csv)" not in text]
    text = template.render(federations=FEDERATIONS, by_rate=by_rate, others=others)
    return re.sub(r"\n{3,}", "\n\n", text)


def comparisons() -> list[str]:
    """Return the names of all comparisons."""
    return [name for name, about in read_commands().items() if about["kind"] == "comparison"]
