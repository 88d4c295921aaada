"""Tables as text: Markdown, LaTeX and CSV of the same rows, the first of which is the head."""

import csv
import io
from collections.abc import Sequence
from statistics import fmean, stdev

from fedld.records.tables import guarded, no_html

Rows = Sequence[Sequence[str]]


def spread(values: Sequence[float] | None, digits: int = 2) -> str:
    """Write mean ± standard deviation.

    >>> spread([80.0, 82.0]), spread([80.0]), spread(None)
    ('81.00 ± 1.41', '80.00', '-')
    """
    if not values:
        return "-"
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{deviation}"


def markdown(rows: Rows) -> str:
    """Write rows as a table in GitHub's Markdown."""
    head, *body = rows
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def without_html(text: str) -> str:
    r"""Escape HTML in Markdown; blocks of code stay as they are.

    >>> without_html("a <b>\n```\nx < y\n```")
    'a &lt;b>\n```\nx < y\n```'
    """
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        lines.append(line if code else no_html(line))
    return "\n".join(lines)


def latex(rows: Rows, comment: str = "", caption: str = "") -> str:
    """Write a tabular with a comment on its origin; with a caption in a table environment."""
    head, *body = ([_tex(cell) for cell in row] for row in rows)
    comments = "".join(f"% {line}\n" for line in comment.splitlines())
    lines = "\n".join(" & ".join(row) + r" \\" for row in body)
    tabular = (
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n\\hline\n{' & '.join(head)} \\\\\n\\hline\n"
        f"{lines}\n\\hline\n\\end{{tabular}}\n"
    )
    if caption:
        tabular = f"\\begin{{table}}\n\\centering\n\\caption{{{_tex(caption)}}}\n{tabular}\\end{{table}}\n"
    return comments + tabular


def comma_separated(rows: Sequence[Sequence[object]]) -> str:
    """Write CSV in which names cannot become formulas."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([[guarded(cell) for cell in row] for row in rows])
    return buffer.getvalue()


def _tex(text: str) -> str:
    r"""Escape the text of a cell.

    >>> _tex("81.00 ± 1.41"), _tex("a_b"), _tex("95 %")
    ('81.00 $\\pm$ 1.41', 'a\\_b', '95 \\%')
    """
    for character in "\\&%$#_{}":
        text = text.replace(character, "\\" + character if character != "\\" else "/")
    return text.replace("±", "$\\pm$").replace("^", "\\^{}").replace("~", "\\~{}")
