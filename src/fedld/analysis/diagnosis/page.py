"""A diagnosis as a page: of a run, or of a federation before any training."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedld.analysis.diagnosis.evidence import Evidence, Finding
from fedld.analysis.diagnosis.gather import diagnose, diagnose_all, evidence_of
from fedld.analysis.heterogeneity import image_features
from fedld.data import Federation
from fedld.data.targets import target_facts
from fedld.errors import FedLDError
from fedld.records.reader import read_one, read_run
from fedld.records.tables import no_html
from fedld.records.writer import dump, write_atomically


@dataclass(frozen=True)
class Diagnosis:
    """Findings about one federation, and the checks that lack measurements."""

    title: str
    findings: list[Finding]
    not_measured: list[str]

    @property
    def warnings(self) -> list[Finding]:
        """What hurts."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_json(self) -> dict[str, Any]:
        """Give plain data."""
        findings = [finding.to_json() for finding in self.findings]
        return {"title": self.title, "findings": findings, "not_measured": self.not_measured}

    def to_markdown(self) -> str:
        """Write the verdict, then every sentence with its numbers, thresholds and advice."""
        lines = [f"# {self.title}", "", self.verdict, ""]
        for finding in self.findings:
            lines += [f"- **{finding.check}** ({finding.level}): {finding.sentence}"]
            lines += [f"  Try: {finding.advice}"] if finding.advice else []
            lines += [f"  Numbers: {_numbers(finding.numbers)}."]
            if finding.thresholds:
                lines += [f"  Thresholds: {_numbers(finding.thresholds)}."]
        if self.not_measured:
            lines += ["", f"Not measured: {', '.join(self.not_measured)}."]
        return no_html("\n".join(lines)) + "\n"

    @property
    def verdict(self) -> str:
        """The diagnosis in one sentence."""
        if not self.warnings:
            return "Nothing that was measured shows harm from heterogeneity."
        return f"{len(self.warnings)} warning(s): {', '.join(finding.check for finding in self.warnings)}."

    def write(self, folder: Path) -> None:
        """Write diagnosis.md and diagnosis.json."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "diagnosis.md", self.to_markdown().encode())
            write_atomically(folder / "diagnosis.json", dump(self.to_json()).encode() + b"\n")
        except OSError as error:
            raise FedLDError(f"cannot write to '{folder}': {error.strerror}") from None


def diagnose_run(path: Path) -> Diagnosis:
    """Diagnose a run or all runs of a study from their records, finished or not."""
    if (path / "study.json").exists():
        return diagnose_study(path)
    if not (path / "config.toml").exists():
        raise FedLDError(f"'{path}' holds no run")
    run = read_run(path)
    return _diagnosis(f"{run.label} on {run.config.get('dataset', 'unknown data')}", evidence_of(run))


def diagnose_study(path: Path) -> Diagnosis:
    """Diagnose all runs of a study: findings by method, and the number of seeds that have them.

    Args:
        path: study directory.

    Returns:
        Findings that runs have in common; each says where it holds.

    Raises:
        FedLDError: the study has no readable runs.
    """
    study = read_one(path)
    if not study.runs:
        raise FedLDError(f"the study '{path}' holds no run that can be read")
    findings = []
    for shared in diagnose_all(study.runs):
        where = f" ({shared.where})" if shared.where else ""
        findings.append(replace(shared.finding, sentence=shared.finding.sentence + where))
    lacking = [name for run in study.runs for name in evidence_of(run).not_measured]
    return Diagnosis(study.name, findings, list(dict.fromkeys(lacking)))


def diagnose_federation(federation: Federation) -> Diagnosis:
    """Diagnose data before training, from labels and images alone."""
    names = [client.name for client in federation.clients]
    title = f"{federation.name}, {len(names)} clients, before training"
    means, spreads = image_features(
        federation.images, federation.strata, [client.train for client in federation.clients]
    )
    evidence = Evidence(
        clients=names,
        label_counts=federation.label_counts(),
        feature_means=means,
        feature_spreads=spreads,
        samples=federation.samples,
        groups=federation.groups,
        targets=[target_facts(federation, client) for client in federation.clients],
    )
    return _diagnosis(title, evidence)


def _diagnosis(title: str, evidence: Evidence) -> Diagnosis:
    return Diagnosis(title, diagnose(evidence), evidence.not_measured)


def _numbers(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {_short(value)}" for name, value in numbers.items())


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    return str(value)
