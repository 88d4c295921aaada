"""The card of one method of a study: what its runs have in common, run by run and as means over them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedld.errors import FedLDError
from fedld.records.reader import clean, read_one
from fedld.records.writer import dump, write_atomically
from fedld.study.card import STATEMENTS, ModelCard, make_card
from fedld.study.comparison import Comparison, compare_runs
from fedld.study.formats import markdown, without_html


@dataclass(frozen=True)
class StudyCard:
    """A card of the runs of one method: the models that their seeds or folds gave.

    Args:
        method: label of the method in the study.
        cards: the card of every finished run, by its name.
        comparison: the study, in which the method stands beside the others.
    """

    method: str
    cards: dict[str, ModelCard]
    comparison: Comparison

    @property
    def limitations(self) -> list[str]:
        """What limits the models, and in how many runs."""
        said = [line for card in self.cards.values() for line in card.limitations]
        runs = len(self.cards)
        counted = {line: said.count(line) for line in dict.fromkeys(said)}
        return [line if n == runs else f"{line} ({n} of {runs} runs)" for line, n in counted.items()]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            "method": self.method,
            "verdict": self.comparison.verdict,
            "limitations": self.limitations,
            "runs": {name: card.to_json() for name, card in self.cards.items()},
        }

    @property
    def title(self) -> str:
        """Method and data."""
        return clean(f"{self.method} on {self._first.summary['dataset']}, {len(self.cards)} runs")

    def to_markdown(self) -> str:
        """The card to read."""
        first = self._first
        head, *rows = self.comparison.table
        own = [row for row in rows if row[0] == self.method]
        parts = {
            f"# Model card: {self.title}": [f"{self.comparison.verdict}.", "", self._statements()],
            "## Results over all runs": [markdown([head, *own]), self.comparison.method_note],
            "## Results of every run": [self._runs()],
            "## Data, as the sites disclose it": first._data(),
            "## Limitations": [f"- {line}" for line in self.limitations],
            "## Method and configuration of the first run": first._method(),
            "## How to use it": [
                "The mean of all models' probabilities:",
                "",
                "```",
                f"fedld predict STUDY PICTURES --method {clean(self.method)} --out told.csv",
                "```",
            ],
        }
        text = [line for title, lines in parts.items() for line in (title, "", *lines, "")]
        return without_html("\n".join(text))

    def write(self, folder: Path) -> None:
        """Write card.md and card.json.

        Raises:
            FedLDError: the folder cannot be written to.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "card.md", self.to_markdown().encode())
            write_atomically(folder / "card.json", dump(self.to_json()).encode() + b"\n")
        except OSError as error:
            raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None

    @property
    def _first(self) -> ModelCard:
        return next(iter(self.cards.values()))

    def _statements(self) -> str:
        rows = [["fact", "value"]]
        for name, text in STATEMENTS.items():
            rows.append([text, clean(self._first.statements.get(name) or f"not stated: give --{name}")])
        return markdown(rows)

    def _runs(self) -> str:
        """One row per run: its results on all test pictures, and which file it is about."""
        rows = [["run", "pictures", "accuracy", "AUROC", "sensitivity", "SHA-256 of model.safetensors"]]
        for name, card in self.cards.items():
            one = card.everybody
            values = ["-"] * 4 if one is None else [str(one.pictures), *map(str, one.estimates)]
            rows.append([clean(name), *values, f"`{card.checksum}`" if card.checksum else "no global model"])
        return markdown(rows)


def make_study_card(
    path: Path, method: str | None = None, statements: Mapping[str, str | None] | None = None
) -> StudyCard:
    """Make the card of one method of a study.

    Args:
        path: study directory.
        method: its label in the study; None where the study has one method.
        statements: what its owner says of the models, by the names of `STATEMENTS`.

    Returns:
        The card.

    Raises:
        FedLDError: no such method, or none of its runs is finished.
    """
    study = read_one(path)
    labels = list(dict.fromkeys(run.label for run in study.runs))
    if method is None and len(labels) == 1:
        method = labels[0]
    if method not in labels:
        asked = "name one with --method" if method is None else f"'{method}' is none of them"
        raise FedLDError(f"the methods of '{path}' are {', '.join(labels)}: {asked}")
    finished = [run for run in study.runs if run.label == method and run.summary is not None]
    if not finished:
        raise FedLDError(f"no run of '{method}' in '{path}' is finished")
    compared = compare_runs(study.name, study.runs, study.baseline, study.primary, study.target)
    cards = {run.path.name: make_card(run.path, statements=statements) for run in finished}
    return StudyCard(method, cards, compared)
