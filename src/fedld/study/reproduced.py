"""A reproduced table beside the paper's numbers, as Markdown, TeX, JSON and a figure."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

from fedld.engine.records import write_atomically
from fedld.study.table import Row, Table, markdown, spread

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PERSONAL = ("fedbn", "fedpac")
NOTE = (
    "Final test accuracy of the global model in percent, mean ± standard deviation over seeds; differences "
    "are paired over seeds, with 95 % t intervals and p values corrected by Holm. The paper has one seed; "
    "its values for fedbn and fedpac (*) are those of the personalised models."
)


@dataclass(frozen=True)
class Column:
    """One split: its table, and what the paper reports for it."""

    split: str
    data: str
    table: Table
    paper: dict[str, float]

    def cell(self, label: str) -> str:
        """The paper's value."""
        if label not in self.paper:
            return "-"
        return f"{self.paper[label]:.2f}" + ("*" if label in PERSONAL else "")


@dataclass(frozen=True)
class Reproduced:
    """Table 1, 2 or 3, split by split."""

    table: str
    title: str
    command: str
    columns: list[Column]

    @property
    def labels(self) -> list[str]:
        """Rows, in order."""
        return [row.label for row in self.columns[0].table.rows]

    def write(self, out: Path) -> None:
        """table.json, table.md, table.tex and differences.png/svg."""
        write_atomically(out / "table.json", json.dumps(self.to_json(), indent=1).encode())
        write_atomically(out / "table.md", self.to_markdown().encode())
        write_atomically(out / "table.tex", self.to_tex().encode())
        self.draw(out / "differences")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        columns = [
            {"split": c.split, "data": c.data, "paper": c.paper, "baseline": c.table.baseline}
            | {"rows": [asdict(row) | _moments(row) for row in c.table.rows]}
            | {"causes": [asdict(cause) for cause in c.table.causes]}
            for c in self.columns
        ]
        return {"table": self.table, "title": self.title, "command": self.command, "columns": columns}

    def to_markdown(self) -> str:
        """The overview as in the paper, then every split in full."""
        text = [f"# {self.title}", "", NOTE, "", markdown(self._overview())]
        for column in self.columns:
            head = ["", *Row.COLUMNS, "paper"]
            rows = [[row.label, *row.cells(), column.cell(row.label)] for row in column.table.rows]
            text += ["", f"## {column.data}", "", markdown([head, *rows]), column.table.why()]
        return "\n".join(text) + f"\nMade by `{self.command}`.\n"

    def to_tex(self) -> str:
        """The overview as a tabular."""
        head, *rows = self._overview()
        body = "\n".join(" & ".join(_tex(cell) for cell in row) + r" \\" for row in rows)
        columns = "l" + "r" * (len(head) - 1)
        titles = " & ".join(_tex(cell) for cell in head)
        return (
            f"% {self.title}\n% {self.command}\n\\begin{{tabular}}{{{columns}}}\n\\hline\n"
            f"{titles} \\\\\n\\hline\n{body}\n\\hline\n\\end{{tabular}}\n"
        )

    def _overview(self) -> list[list[str]]:
        head = [""] + [title for c in self.columns for title in (c.data, f"paper: {c.split}")]
        rows = [
            [label] + [text for c in self.columns for text in (_final(c.table, label), c.cell(label))]
            for label in self.labels
        ]
        return [head, *rows]

    def draw(self, path: Path) -> None:
        """Paired differences to the baseline with their 95 % intervals, as PNG and SVG."""
        with plt.rc_context({"svg.hashsalt": "fedld"}):
            count, width = len(self.labels), 3.2 * len(self.columns) + 1
            figure, axes = plt.subplots(
                1, len(self.columns), figsize=(width, 1.4 + 0.3 * count), sharey=True, squeeze=False,
                layout="constrained",
            )  # fmt: skip
            for ax, column in zip(axes[0], self.columns, strict=True):
                for y, row in enumerate(column.table.rows):
                    if row.difference is not None:
                        low, high = row.interval or (row.difference, row.difference)
                        ax.plot([low, high], [y, y], color="#2f6db5", linewidth=2)
                        ax.plot(row.difference, y, "o", color="#2f6db5")
                ax.axvline(0, color="0.5", linewidth=0.8)
                ax.set(title=column.data, xlabel=f"points over {column.table.baseline}")
                ax.set_yticks(range(count), self.labels)
                ax.spines[["top", "right"]].set_visible(False)
            axes[0][0].invert_yaxis()
            figure.savefig(path.with_suffix(".png"), dpi=150)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            plt.close(figure)


def _moments(row: Row) -> dict[str, Any]:
    """Mean and standard deviation of every accuracy."""
    out: dict[str, Any] = {}
    for key in ("final", "last5", "best", "personal"):
        values = getattr(row, key)
        out[f"{key}_mean"] = fmean(values) if values else None
        out[f"{key}_sd"] = stdev(values) if values and len(values) > 1 else None
    return out


def _final(table: Table, label: str) -> str:
    row = next(row for row in table.rows if row.label == label)
    return spread(row.final) if row.final else f"{spread(row.personal)} (personalised)"


def _tex(text: str) -> str:
    r"""Text of a cell.

    >>> _tex("81.00 ± 1.41"), _tex("a_b")
    ('81.00 $\\pm$ 1.41', 'a\\_b')
    """
    for character in "\\&%$#_{}":
        text = text.replace(character, "\\" + character if character != "\\" else "/")
    return text.replace("±", "$\\pm$")
