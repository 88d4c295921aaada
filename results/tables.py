"""Tables and numbers of the documentation, read from the files in results/ and never typed.

In a page, a table stands between two comments and is written by `python results/tables.py`:

    <!-- results covid-table1 final difference p_value last5 step local shift aggregation -->

    (the table)

    <!-- /results -->

The first word is a folder of results/ (`folder#split` for one split of several), the others are columns; a
word with a comma, such as `fedavg,fedld`, names the rows; a folder with a Figure 2 gives its table. One
column of several folders, each under a heading (its spaces as underlines), and a number in a sentence are
written the same way:

    <!-- across final 0.01=covid-head-lr0.01 0.1=covid-head-lr0.1 -->

    (the table)

    <!-- /across -->

    <!-- value covid-table1 fedavg final -->62.70 ± 0.96<!-- /value -->

So is a number's range over several tables, the smallest and the largest mean; folders may be a pattern:

    <!-- span fedavg final covid-head-lr* -->73.2 to 79.5<!-- /span -->

And how every method stands over several tables: in how many it is surely ahead of the baseline, or behind
(p below 0.05 after correction), and its differences, in points of accuracy or of the AUROC:

    <!-- standing accuracy *-head-tuned -->

    (the table)

    <!-- /standing -->

And a term of a Figure 2, the mean over seeds at one alpha or its range over all of them: of an arm, of one
arm minus another, or of one beside another, in per cent:

    <!-- point figure2-fundus-head plain shift 0.01 -->0.466<!-- /point -->
    <!-- point figure2-fundus-head margin-plain shift all -->-0.018 to -0.000<!-- /point -->
    <!-- point figure2-fundus-head margin/plain shift 0.01 -->-4 %<!-- /point -->

`python results/tables.py --check` (and a test) says which page is not up to date.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedld.analysis.statistics import holm, paired_difference

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"(<!-- results ([^>]*?) -->\n\n).*?(\n\n<!-- /results -->)", re.DOTALL)
ACROSS = re.compile(r"(<!-- across ([^>]*?) -->\n\n).*?(\n\n<!-- /across -->)", re.DOTALL)
SPAN = re.compile(r"(<!-- span (\S+) (\S+) ([^>]*?) -->).*?(<!-- /span -->)", re.DOTALL)
STANDING = re.compile(r"(<!-- standing ([^>]*?) -->\n\n).*?(\n\n<!-- /standing -->)", re.DOTALL)
POINT = re.compile(r"(<!-- point (\S+) (\S+) (\S+) (\S+) -->).*?(<!-- /point -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value (\S+) (\S+) (\S+) -->).*?(<!-- /value -->)", re.DOTALL)

Row = dict[str, Any]


def spread(digits: int = 2) -> Callable[[Row, str], str]:
    """Mean ± standard deviation over seeds."""

    def text(row: Row, key: str) -> str:
        values = row.get(key)
        if not values:
            return "-"
        deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{fmean(values):.{digits}f}{deviation}"

    return text


def number(form: str, missing: str = "-") -> Callable[[Row, str], str]:
    """A single number."""
    return lambda row, key: missing if row.get(key) is None else format(row[key], form)


def difference(row: Row, _: str) -> str:
    """Paired difference to the baseline with its interval."""
    if row["difference"] is None:
        return ""
    interval = row["interval"]
    return f"{row['difference']:+.2f}" + (f" [{interval[0]:+.2f}, {interval[1]:+.2f}]" if interval else "")


def difference_in_auroc(row: Row, _: str) -> str:
    """The same in points of the AUROC, which no threshold and no share of the classes moves."""
    return difference(row["in_auroc"], "") if row.get("in_auroc") else ""


def p_value(row: Row, key: str) -> str:
    """A probability; small ones are not rounded to nothing."""
    p = row.get(key)
    return "" if p is None else f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def never(row: Row, key: str) -> str:
    """Classes that the model never names, and in how many of the seeds."""
    found, seeds = row.get(key) or {}, len(row["seeds"])
    return ", ".join(f"{name} ({n} of {seeds} seeds)" for name, n in found.items()) or "-"


COLUMNS: dict[str, tuple[str, Callable[[Row, str], str]]] = {
    "lr": ("rate", lambda row, key: row.get(key) or "-"),
    "own": ("lambda, mu", lambda row, key: row.get(key) or "-"),
    "final": ("final, %", spread()),
    "difference": ("difference to {baseline} [95 %]", difference),
    "p_value": ("p (Holm)", p_value),
    "effect_size": ("effect", number("+.1f", "")),
    "last5": ("last 5", spread()),
    "best": ("best", spread()),
    "personal": ("personalised", spread()),
    "balanced_accuracy": ("balanced, %", spread()),
    "auroc": ("AUROC", spread(4)),
    "auroc_difference": ("AUROC, points to {baseline} [95 %]", difference_in_auroc),
    "worst_client": ("worst client, %", spread()),
    "loss": ("loss", spread(3)),
    "step": ("step / average's", number(".2f")),
    "cosine": ("cosine", number(".2f")),
    "local": ("local", number(".2f")),
    "shift": ("+ shift", number("+.2f")),
    "aggregation": ("+ aggregation", number("+.2f")),
    "gap": ("of the gap to pooled data", number(".0%")),
    "never_predicted": ("never predicted", never),
    "megabytes": ("MB", number(".1f")),
    "seconds": ("s", number(".0f")),
}
SPANS = {
    "difference": "+.1f",
    "auroc": ".3f",
    "local": ".2f",
    "shift": "+.2f",
    "aggregation": "+.2f",
    "gap": ".0%",
}
NAMES = {"fedavg": "FedAvg", "none": "FedAvg"}


def rows_of(name: str) -> tuple[list[Row], str]:
    """Rows of a table, each with its account, and the baseline's name."""
    folder, _, split = name.partition("#")
    found = json.loads((ROOT / "results" / folder / "table.json").read_text())
    command = found.get("command", "")
    if "columns" in found:
        parts = [part for part in found["columns"] if split in ("", part["split"])]
        if len(parts) != 1:
            raise SystemExit(f"'{name}' names {len(parts)} splits of results/{folder}: say {folder}#SPLIT")
        (found,) = parts
    causes = {cause["label"]: cause for cause in found["causes"]}
    rows = [
        {"lr": rate_of(command, row["label"]), "own": number_of(command, row["label"])}
        | causes.get(row["label"], {})
        | row
        for row in found["rows"]
    ]
    rows = with_auroc(with_gaps(rows), found["baseline"])
    return rows, NAMES.get(found["baseline"], found["baseline"])


def rate_of(command: str, label: str) -> str | None:
    """The learning rate of a row: the method's own, or that of all.

    >>> rate_of("fedld compare --lr 0.1 --set fedld.lr=0.03", "fedld")
    '0.03'
    """
    found = re.search(rf"--set {re.escape(label)}\.lr=(\S+)", command) or re.search(r"--lr (\S+)", command)
    return found[1] if found else None


def number_of(command: str, label: str) -> str | None:
    """A row's own lambda or mu; of several the last counts.

    >>> number_of("fedld compare --set fedprox.mu=0.01 --set fedprox.mu=0.1", "fedprox")
    '0.1'
    """
    own = re.escape(label)
    found = re.findall(rf"--set '?{own}\.(?:mu=|objective=\S*lam=)([\d.e-]+)", command)
    return found[-1] if found else None


def with_gaps(rows: list[Row]) -> list[Row]:
    """Rows with the share of pooled training's lead over the baseline that a method wins.

    There is no such share where pooled training is not surely ahead (its interval holds 0).
    """
    pooled = next((row for row in rows if row["label"] == "central"), {})
    if not pooled.get("interval") or pooled["interval"][0] <= 0:
        return rows
    return [
        row if row["difference"] is None else row | {"gap": row["difference"] / pooled["difference"]}
        for row in rows
    ]


def with_auroc(rows: list[Row], baseline: str) -> list[Row]:
    """Rows with their paired difference in the AUROC, p corrected within the table as for the accuracy."""
    by_seed = {
        row["label"]: {seed: 100 * x for seed, x in zip(row["seeds"], row.get("auroc") or [], strict=False)}
        for row in rows
    }
    base = by_seed.pop(baseline, {})
    pairs = {label: [seed for seed in values if seed in base] for label, values in by_seed.items()}
    tests = {
        label: paired_difference([by_seed[label][seed] for seed in seeds], [base[seed] for seed in seeds])
        for label, seeds in pairs.items()
        if seeds
    }
    adjusted = dict(zip(tests, holm([test.p_value for test in tests.values()]), strict=True))
    found = {
        label: {"difference": test.mean, "interval": test.interval, "p_value": adjusted[label]}
        for label, test in tests.items()
    }
    return [row | {"in_auroc": found.get(row["label"])} for row in rows]


def known(column: str) -> tuple[str, Callable[[Row, str], str]]:
    """Heading and format of a column."""
    if column not in COLUMNS:
        raise SystemExit(f"unknown column '{column}': there are {', '.join(COLUMNS)}")
    return COLUMNS[column]


def cell(row: Row, column: str) -> str:
    """One cell as text."""
    return known(column)[1](row, column)


def table(words: str) -> str:
    """The table that a comment asks for."""
    name, *rest = words.split()
    figure = ROOT / "results" / name / "figure2.md"
    if figure.exists():
        return "\n".join(line for line in figure.read_text().splitlines() if line.startswith("|"))
    chosen = next((word.split(",") for word in rest if "," in word), None)
    columns = [word for word in rest if "," not in word]
    rows, baseline = rows_of(name)
    head = [known(column)[0].format(baseline=baseline) for column in columns]
    body = {
        row["label"]: [cell(row, c) for c in columns] for row in rows if not chosen or row["label"] in chosen
    }
    return markdown(head, body)


def across(words: str) -> str:
    """One column of several tables beside each other."""
    column, *rest = words.split()
    parts = dict(word.split("=") for word in rest)
    found = {heading: {row["label"]: row for row in rows_of(name)[0]} for heading, name in parts.items()}
    labels = dict.fromkeys(label for rows in found.values() for label in rows)
    body = {
        label: [cell(rows[label], column) if label in rows else "-" for rows in found.values()]
        for label in labels
    }
    said = {label: cells for label, cells in body.items() if any(cells)}  # the baseline has no difference
    return markdown([heading.replace("_", " ") for heading in found], said)


def markdown(head: list[str], body: dict[str, list[str]]) -> str:
    """A table with the rows' names in front."""
    rows = [
        ["", *head],
        ["---"] * (len(head) + 1),
        *([f"`{label}`", *cells] for label, cells in body.items()),
    ]
    first, rule, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([first, rule.replace(" ", ""), *rest])


def value(name: str, label: str, column: str) -> str:
    """One number of a table."""
    return cell(row_of(name, label), column)


def row_of(name: str, label: str) -> Row:
    """One row of a table."""
    rows, _ = rows_of(name)
    found = [row for row in rows if row["label"] == label]
    if not found:
        raise SystemExit(f"results/{name} has no row '{label}'")
    return found[0]


def span(label: str, column: str, names: str) -> str:
    """The smallest and the largest mean of a row's number over several tables."""
    known(column)
    found = [row_of(name, label)[column] for name in folders(names)]
    means = sorted(fmean(one) if isinstance(one, list) else one for one in found)
    form = SPANS.get(column, ".1f")
    return f"{means[0]:{form}} to {means[-1]:{form}}"


def folders(words: str) -> list[str]:
    """Names of tables, patterns among them written out."""
    found = []
    for word in words.split():
        paths = sorted((ROOT / "results").glob(f"{word.partition('#')[0]}/table.json"))
        if not paths:
            raise SystemExit(f"no table in results/{word}")
        found += [path.parent.name for path in paths] if "*" in word or "[" in word else [word]
    return found


def standing(words: str) -> str:
    """How often each method is surely ahead of the baseline and behind it, and by how much."""
    measure, _, names = words.partition(" ")
    if measure not in ("accuracy", "auroc"):
        raise SystemExit(f"a standing is in accuracy or auroc, not '{measure}'")
    found: dict[str, list[Row]] = {}
    for name in folders(names):
        for row in rows_of(name)[0]:
            one = row if measure == "accuracy" else row["in_auroc"]
            if one and one["difference"] is not None:
                found.setdefault(row["label"], []).append(one)
    body = {}
    for label, rows in found.items():
        sure = [row["difference"] for row in rows if row["p_value"] is not None and row["p_value"] < 0.05]
        ahead, behind = sum(d > 0 for d in sure), sum(d < 0 for d in sure)
        differences = [row["difference"] for row in rows]
        body[label] = [str(n) for n in (ahead, len(rows) - ahead - behind, behind)]
        body[label] += [f"{of(differences):+.2f}" for of in (fmean, min, max)]
    return markdown(["surely ahead", "not told apart", "surely behind", "mean", "worst", "best"], body)


def point(folder: str, arms: str, term: str, alpha: str) -> str:
    """A term of a Figure 2, or how two arms differ in it, at one alpha or over all."""
    points = json.loads((ROOT / "results" / folder / "figure2.json").read_text())["points"]
    first, sign, second = re.split(r"([-/])", arms) if re.search(r"[-/]", arms) else (arms, "", "")

    def mean(arm: str, at: float) -> float:
        found = [one[term] for one in points if one["arm"] == arm and one["alpha"] == at]
        if not found:
            raise SystemExit(f"results/{folder} has no '{arm}' at alpha {at}")
        return fmean(found)

    def text(at: float) -> str:
        if not sign:
            return f"{mean(first, at):.3f}"
        change = mean(first, at) - mean(second, at)
        return f"{change:+.3f}" if sign == "-" else f"{change / mean(second, at):+.0%}".replace("%", " %")

    if alpha != "all":
        return text(float(alpha))
    found = sorted({text(one["alpha"]) for one in points}, key=lambda one: float(one.split()[0]))
    return f"{found[0]} to {found[-1]}"


def current(page: str) -> str:
    """A page with all its tables and numbers as the files have them."""
    page = TABLE.sub(lambda m: f"{m[1]}{table(m[2])}{m[3]}", page)
    page = ACROSS.sub(lambda m: f"{m[1]}{across(m[2])}{m[3]}", page)
    page = SPAN.sub(lambda m: f"{m[1]}{span(m[2], m[3], m[4])}{m[5]}", page)
    page = STANDING.sub(lambda m: f"{m[1]}{standing(m[2])}{m[3]}", page)
    page = POINT.sub(lambda m: f"{m[1]}{point(m[2], m[3], m[4], m[5])}{m[6]}", page)
    return VALUE.sub(lambda m: f"{m[1]}{value(m[2], m[3], m[4])}{m[5]}", page)


def main() -> None:
    """Rewrite the pages, or say which are not current."""
    stale = [path for path in PAGES if current(path.read_text()) != path.read_text()]
    if "--check" in sys.argv[1:]:
        if stale:
            raise SystemExit(f"not current: {', '.join(map(str, stale))}; run: python results/tables.py")
        return
    for path in stale:
        path.write_text(current(path.read_text()))
        print(f"rewritten: {path}")


if __name__ == "__main__":
    main()
