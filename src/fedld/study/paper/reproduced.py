"""A reproduced table beside the paper's numbers, as Markdown, TeX, JSON, CSV and a figure."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from fedld.records.table import no_html
from fedld.records.writer import write_atomically
from fedld.study.comparison import Comparison
from fedld.study.formats import comma_separated, latex, markdown, spread

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
    """One split: its comparison, and what the paper reports for it."""

    split: str
    data: str
    comparison: Comparison
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
        return [s.label for s in self.columns[0].comparison.standings]

    def write(self, out: Path) -> None:
        """table.json, table.md, table.tex, table.csv and differences.png/svg."""
        write_atomically(out / "table.json", json.dumps(self.to_json(), indent=1).encode())
        write_atomically(out / "table.md", self.to_markdown().encode())
        write_atomically(out / "table.tex", self.to_tex().encode())
        write_atomically(out / "table.csv", self.to_csv().encode())
        self.draw(out / "differences")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        columns = [
            {"split": c.split, "data": c.data, "paper": c.paper} | c.comparison.to_json()
            for c in self.columns
        ]
        return {"table": self.table, "title": self.title, "command": self.command, "columns": columns}

    def to_markdown(self) -> str:
        """The overview as in the paper, then every split in full."""
        text = [f"# {self.title}", "", NOTE, "", markdown(self._overview())]
        for column in self.columns:
            head, *rows = column.comparison.table
            rows = [[*head, "paper"], *([*row, column.cell(row[0])] for row in rows)]
            said = [f"{column.comparison.verdict}.", *(f"- {line}" for line in column.comparison.warnings)]
            text += ["", f"## {column.data}", "", *said, "", markdown(rows), column.comparison.why()]
        return no_html("\n".join(text) + f"\nMade by `{self.command}`.\n")

    def to_tex(self) -> str:
        """The overview as a tabular."""
        return latex(self._overview(), f"{self.title}\n{self.command}")

    def to_csv(self) -> str:
        """One row per split, method, seed and measure."""
        values = [[c.split, *row] for c in self.columns for row in c.comparison.values()]
        return comma_separated([["split", "method", "seed", "measure", "value"], *values])

    def _overview(self) -> list[list[str]]:
        head = [""] + [title for c in self.columns for title in (c.data, f"paper: {c.split}")]
        rows = [
            [label] + [text for c in self.columns for text in (_final(c.comparison, label), c.cell(label))]
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
                for y, standing in enumerate(column.comparison.standings):
                    if (d := standing.difference) is not None:
                        ax.plot(d.interval or (d.mean, d.mean), [y, y], color="#2f6db5", linewidth=2)
                        ax.plot(d.mean, y, "o", color="#2f6db5")
                ax.axvline(0, color="0.5", linewidth=0.8)
                shown = column.comparison.shown
                unit = "points" if shown.unit == "%" else "units"
                over = f"{unit} of {shown.title} over {column.comparison.baseline}"
                ax.set(title=column.data, xlabel=over)
                ax.set_yticks(range(count), self.labels)
                ax.spines[["top", "right"]].set_visible(False)
            axes[0][0].invert_yaxis()
            figure.savefig(path.with_suffix(".png"), dpi=300)
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
            plt.close(figure)


def _final(comparison: Comparison, label: str) -> str:
    standing = comparison.standing(label)
    if (name := comparison.first.name) in standing.values:
        return spread(list(standing.values[name].values()))
    return f"{spread(list(standing.personal.values()))} (personalised)"
