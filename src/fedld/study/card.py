"""A model card: what a model is, what it was trained on and how, how well it does where, and its limits.

Everything in it is read from the run directory; nothing is measured again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedld.analysis.diagnosis.page import diagnose_run
from fedld.analysis.sites import SiteResult
from fedld.errors import FedLDError
from fedld.models.files import ModelFile, read_model
from fedld.records.reader import Run, clean, read_object, read_one, read_run
from fedld.records.schema import Summary, Which
from fedld.records.tables import read_predictions
from fedld.records.writer import dump, write_atomically
from fedld.study.comparison import Comparison, compare_runs
from fedld.study.formats import markdown, without_html
from fedld.study.sites import measured_at_sites, site_results, sites_apart

FEW = 50
"""Test pictures below which a site's result is called uncertain."""

STATEMENTS = {"use": "intended use", "owner": "owner", "licence": "licence"}
"""Statements of a model's owner; `fedld card` takes each as an option."""

ELSEWHERE = "How the model does on pictures of places that are not among the test pictures is unknown."


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A model card of one run."""

    run: Run
    summary: Summary
    federation: dict[str, Any]
    metadata: dict[str, str]
    overall: SiteResult | None
    sites: dict[str, SiteResult]
    at_sites: dict[str, dict[Which, SiteResult]]
    positive: str
    specificity: float
    limitations: list[str]
    statements: dict[str, str]
    checksum: str | None

    def to_json(self) -> dict[str, Any]:
        """Give the card as plain data."""
        fields = ("dataset", "partition", "classes", "image_shape", "train", "test", "notes", "fingerprint")
        results = {name: site.to_json() for name, site in self.sites.items()}
        return {
            "title": self.title,
            "version": self.summary["version"],
            "summary": self.summary,
            "configuration": self.run.config,
            "data": {key: self.federation.get(key) for key in (*fields, "clients")},
            "results": {
                "positive_class": self.positive,
                "specificity": self.specificity,
                "confidence": 0.95,
                "all": self.overall.to_json() if self.overall else None,
                "sites": results,
                "at_sites": self.summary.get("sites", {}),
            },
            "participation": self.summary["participation"],
            "limitations": self.limitations,
            "statements": {name: self.statements.get(name) for name in STATEMENTS},
            "model_sha256": self.checksum,
            "model_file": self.metadata,
        }

    @property
    def title(self) -> str:
        """Method and data."""
        return clean(f"{self.run.label} on {self.summary['dataset']}")

    def to_markdown(self) -> str:
        """Write the card as Markdown."""
        parts = [
            ("", [f"# Model card: {self.title}", "", self._headline(), "", self._identity()]),
            ("Results", self._results()),
            *self._own_results(),
            ("Data, as the sites disclose it", self._data()),
            ("Participation", self._participation()),
            ("Limitations", [f"- {line}" for line in self.limitations]),
            ("Method and configuration", self._method()),
            ("How to use it", self._use()),
        ]
        text = [[f"## {head}", ""] if head else [] for head, _ in parts]
        body = "\n\n".join("\n".join([*text[k], *lines]) for k, (_, lines) in enumerate(parts))
        return without_html(body) + "\n"

    def write(self, folder: Path) -> None:
        """Write card.md and card.json."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "card.md", self.to_markdown().encode())
            write_atomically(folder / "card.json", dump(self.to_json()).encode() + b"\n")
        except OSError as error:
            raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None

    def _headline(self) -> str:
        s = self.summary
        network = f"{s['model']}, {s['parameters']} parameters, {s['trained_parameters']} of them trained"
        return (
            f"{clean(network)}; {s['rounds']} rounds with {s['clients']} clients, seed {s['seed']}, "
            f"fedld {s['version']}."
        )

    def _identity(self) -> str:
        """Tabulate date, owner, purpose, licence, and the checksum of the model file."""
        made = self.summary.get("finished") or "not recorded: the run is older than this field"
        file = f"`{self.checksum}`" if self.checksum else "no global model"
        rows = [["fact", "value"], ["training finished (UTC)", clean(made)]]
        rows.append(["SHA-256 of model.safetensors", file])
        for name, text in STATEMENTS.items():
            rows.append([text, clean(self.statements.get(name) or f"not stated: give --{name}")])
        return markdown(rows)

    def _results(self) -> list[str]:
        if self.run.task != "classification":
            return self._measures()[1:] + self._by_site()
        if self.overall is None:
            return ["There are no predictions of a global model: every client keeps its own."]
        head = [
            "test pictures of",
            "pictures",
            "accuracy",
            "AUROC",
            f"sensitivity for {clean(self.positive)} at specificity {self.specificity:g}",
        ]
        rows = [_row("all", self.overall)]
        rows += [_row(clean(name), site) for name, site in self.sites.items()]
        how = "Brackets hold 95 % intervals: Wilson's (accuracy), DeLong's (AUROC), a bootstrap (sensitivity)"
        patients = self.overall.patients
        unit = (
            "." if patients is None else f"; pictures of one of the {patients} patients are not independent."
        )
        return [markdown([head, *rows]), "", how + unit, *self._measures(), *self._best()]

    def _by_site(self) -> list[str]:
        """Tabulate the measures of the last round on every client's own test samples."""
        lines = [line for line in self.run.rounds.lines if line.get("client_tests")]
        if not lines:
            return []
        clients = lines[-1]["client_tests"]
        measures = [
            measure
            for measure in self.run.measures.values()
            if any(measure.name in s for s in clients.values())
        ]
        rows = [["test samples of", "samples", *(measure.heading for measure in measures)]]
        for name, scores in clients.items():
            values = [scores.get(measure.name) for measure in measures]
            cells = [
                "-" if v is None else measure.format(measure.scaled(v))
                for measure, v in zip(measures, values, strict=True)
            ]
            rows.append([clean(name), f"{scores.get('count', 0)}", *cells])
        return ["", markdown(rows)]

    def _measures(self) -> list[str]:
        """List all measures of the final model on the test pictures, the user's among them."""
        final = self.summary.get("test", {}).get("final", {})
        values = []
        for measure in self.run.measures.values():
            value = final.get(measure.name)
            if value is not None:
                values.append(f"{clean(measure.title)} {measure.format(measure.scaled(value))}")
        return ["", f"On all test pictures: {', '.join(values)}."] if values else []

    def _best(self) -> list[str]:
        """Name the round with the best model on the clients' validation images."""
        best = self.summary.get("validated")
        if best is None:
            return []
        first = next(iter(self.run.measures.values()))
        value = best["test"].get(first.name)
        worth = "" if value is None else f"; its {first.title} on the test pictures is {value:.3f}"
        return [
            "",
            f"The results are of the last round, {self.summary['rounds']}. By the pictures that the clients "
            f"set aside from training, round {best['round']} is the best: its model is best.safetensors"
            f"{worth}.",
        ]

    def _own_results(self) -> list[tuple[str, list[str]]]:
        """Tabulate what the sites measured themselves and predictions.csv does not have."""
        rows = [
            _row(clean(name), result, which)
            for name, models in self.at_sites.items()
            for which, result in models.items()
            if which == "personal" or name not in self.sites
        ]
        if not rows:
            return []
        specificity = float(self.run.config.get("specificity", 0.9))
        classes = self.federation.get("classes") or [self.positive]
        sensitivity = f"sensitivity for {clean(classes[-1])} at specificity {specificity:g}"
        head = ["own test pictures of", "model", "pictures", "accuracy", "AUROC", sensitivity]
        return [("Results on each site's own test pictures", [markdown([head, *rows])])]

    def _data(self) -> list[str]:
        classes = [clean(name) for name in self.federation.get("classes") or []]
        rows = [["site", "training pictures", *classes, "test pictures"]]
        for client in self.federation.get("clients") or []:
            cells = [client.get("train"), *(client.get("labels") or [""] * len(classes)), client.get("test")]
            rows.append([clean(client.get("name")), *map(str, cells)])
        shape = " x ".join(map(str, self.federation.get("image_shape") or []))
        summary = f"Pictures of {shape}, divided by {clean(self.federation.get('partition') or 'site')}."
        notes = [f"- {clean(note)}" for note in self.federation.get("notes") or []]
        return [summary, "", markdown(rows), *(["", *notes] if notes else [])]

    def _participation(self) -> list[str]:
        rows = [["site", "rounds asked", "rounds taken part", "missing"]]
        for name, counts in self.summary["participation"].items():
            why = ", ".join(f"{reason} {count}" for reason, count in counts["missing"].items())
            rows.append([clean(name), str(counts["drawn"]), str(counts["took_part"]), why or "-"])
        return [markdown(rows)]

    def _method(self) -> list[str]:
        config = (self.run.path / "config.toml").read_text(encoding="utf-8").rstrip()
        configured, count = self.run.config.get("clients"), self.summary["clients"]
        if configured != count:
            line = f"\nclients = {configured}\n"
            config = config.replace(line, f"{line.rstrip()}  # not used: the data name {count} clients\n")
        machine = ", ".join(f"{key} {value}" for key, value in self.summary["environment"].items())
        return [f"Computed with {clean(machine)}.", "", "```toml", config, "```"]

    def _use(self) -> list[str]:
        if not self.metadata:
            return ["The run has no model file."]
        ledger = self.metadata.get("ledger")
        head = (
            [f"Head of the server's ledger at the end of the run: `{clean(ledger)}`.", ""] if ledger else []
        )
        return [*head, "```", "fedld predict model.safetensors PICTURES --out predictions.csv", "```"]


def make_card(
    path: Path,
    positive: str | None = None,
    specificity: float | None = None,
    statements: Mapping[str, str | None] | None = None,
) -> ModelCard:
    """Make the card of a finished run.

    Args:
        path: run directory.
        positive: class of the sensitivity; None: the last one.
        specificity: of that sensitivity; None: the run's.
        statements: what its owner says of the model, by the names of `STATEMENTS`.

    Raises:
        FedLDError: the run is unfinished or damaged.
    """
    diagnosis = diagnose_run(path)  # refuses what is no run
    run = read_run(path)
    if run.summary is None:
        raise FedLDError(f"'{path}' is unfinished: a model card is written of finished runs")
    if specificity is None:
        specificity = float(run.config.get("specificity", 0.9))
    federation = read_object(path / "federation.json") or {}
    classified = run.task == "classification"
    table = read_predictions(path / "predictions.csv") if classified else None
    if changed := run.change("predictions.csv"):
        raise FedLDError(f"'{path}': {changed}, so a card would show other results than the model's")
    overall, sites = site_results(table, positive, specificity) if table else (None, {})
    file = _model_file(path / "model.safetensors")
    few = [f"{clean(name)} ({site.pictures})" for name, site in sites.items() if site.pictures < FEW]
    limits = [finding.sentence for finding in diagnosis.warnings]
    limits += [f"Few test pictures, so hardly sure: {', '.join(few)}."] if few else []
    limits += [sentence] if overall and (sentence := sites_apart(overall, sites)) else []
    limits += [file.note] if file and file.note else []
    limits += [f"Not measured: {', '.join(diagnosis.not_measured)}."] if diagnosis.not_measured else []
    return ModelCard(
        run=run,
        summary=run.summary,
        federation=federation,
        metadata=file.metadata if file else {},
        overall=overall,
        sites=sites,
        at_sites=measured_at_sites(run.summary),
        positive=positive or (table.classes[-1] if table else ""),
        specificity=specificity,
        limitations=[clean(line) for line in [*limits, *run.problems, ELSEWHERE]],
        statements={name: text for name, text in (statements or {}).items() if text},
        checksum=_checksum(path / "model.safetensors"),
    )


def _checksum(file: Path) -> str | None:
    if not file.is_file():
        return None
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _row(name: str, result: SiteResult, *model: str) -> list[str]:
    return [name, *model, str(result.pictures), *map(str, result.estimates)]


def _model_file(file: Path) -> ModelFile | None:
    """Read and check the run's model; None if every client keeps its own."""
    return read_model(file) if file.is_file() else None


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
        sentences = [line for card in self.cards.values() for line in card.limitations]
        runs = len(self.cards)
        counted = {line: sentences.count(line) for line in dict.fromkeys(sentences)}
        return [line if n == runs else f"{line} ({n} of {runs} runs)" for line, n in counted.items()]

    def to_json(self) -> dict[str, Any]:
        """Give the card as plain data."""
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
        """Write the card as Markdown."""
        first = self._first
        head, *rows = self.comparison.table
        method_rows = [row for row in rows if row[0] == self.method]
        parts = {
            f"# Model card: {self.title}": [f"{self.comparison.verdict}.", "", self._statements()],
            "## Results over all runs": [markdown([head, *method_rows]), self.comparison.method_note],
            "## Results of every run": [self._runs()],
            "## Data, as the sites disclose it": first._data(),
            "## Limitations": [f"- {line}" for line in self.limitations],
            "## Method and configuration of the first run": first._method(),
            "## How to use it": [
                "The mean of all models' probabilities:",
                "",
                "```",
                f"fedld predict STUDY PICTURES --method {clean(self.method)} --out predictions.csv",
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
        """Tabulate every run: its results on all test pictures, and the checksum of its model file."""
        rows = [["run", "pictures", "accuracy", "AUROC", "sensitivity", "SHA-256 of model.safetensors"]]
        for name, card in self.cards.items():
            results = card.overall
            values = ["-"] * 4 if results is None else [str(results.pictures), *map(str, results.estimates)]
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
        problem = "name one with --method" if method is None else f"'{method}' is none of them"
        raise FedLDError(f"the methods of '{path}' are {', '.join(labels)}: {problem}")
    finished = [run for run in study.runs if run.label == method and run.summary is not None]
    if not finished:
        raise FedLDError(f"no run of '{method}' in '{path}' is finished")
    compared = compare_runs(study.name, study.runs, study.baseline, study.primary, target=study.target)
    cards = {run.path.name: make_card(run.path, statements=statements) for run in finished}
    return StudyCard(method, cards, compared)
